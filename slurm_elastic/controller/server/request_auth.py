"""Opens requests and closes replies: `slurm_elastic.rpc.frames` from the controller's side."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.rpc import frames, munge_auth
from slurm_elastic.rpc.frames import Message
from slurm_elastic.rpc.protocol import MAX_REPLY


class RequestAuthError(SlurmElasticError):
    """What arrived is no sealed request, or munge does not answer; the text says which."""


class RequestAuth(Protocol):
    """Who sent what. Called on several threads at once."""

    def trouble(self) -> str:
        """Why nothing can be sealed at present; "" when all is well."""
        ...

    def open(self, frame: bytes) -> Message:
        """A request and its sender.

        Raises:
            SealsError: nobody can tell.
        """
        ...

    def close(self, reply: dict[str, Any], request: Message) -> bytes:
        """A reply, frame and all, for the sender of the request alone.

        Raises:
            SealsError: it cannot be sealed.
        """
        ...


class MungeAuth:
    """Munge's."""

    def trouble(self) -> str:
        """See `RequestAuth`."""
        try:
            munge_auth.seal(b"", purpose="trial", nonce="0")
        except munge_auth.SealError as error:
            return str(error)
        return ""

    def open(self, frame: bytes) -> Message:
        """See `RequestAuth`."""
        try:
            return frames.decode(frame, purpose="request")
        except munge_auth.SealError as error:
            raise RequestAuthError(str(error)) from None
        except ValueError:  # a nonce or a text that no client of ours makes
            raise RequestAuthError("the request cannot be read") from None

    def close(self, reply: dict[str, Any], request: Message) -> bytes:
        """See `RequestAuth`."""
        try:
            return self._close(reply, request)
        except frames.ChannelError as error:
            line = f"{error}: ask for less"
            return self._close({"error": line, "code": "too_large"}, request)
        except munge_auth.SealError as error:
            raise RequestAuthError(str(error)) from None

    def _close(self, reply: dict[str, Any], request: Message) -> bytes:
        return frames.encode(
            reply,
            purpose="reply",
            nonce=request.nonce,
            limit=MAX_REPLY,
            uid=request.uid,
        )
