"""Authentication of requests and sealing of replies, on the controller's side of `rpc.frames`."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.rpc import frames, munge_auth
from slurm_elastic.rpc.frames import Message
from slurm_elastic.rpc.protocol import MAX_REPLY


class RequestAuthError(SlurmElasticError):
    """Input that is no sealed request, or munge does not answer; see the message."""


class RequestAuth(Protocol):
    """Authentication of requests and replies. Called on several threads at once."""

    def problem(self) -> str:
        """Return why nothing can be sealed at present, or ""."""
        ...

    def open(self, frame: bytes) -> Message:
        """Return a request and its sender.

        Raises:
            RequestAuthError: the sender cannot be determined.
        """
        ...

    def close(self, reply: dict[str, Any], request: Message) -> bytes:
        """Return the frame of a reply that only the sender of the request can open.

        Raises:
            RequestAuthError: it cannot be sealed.
        """
        ...


class MungeAuth:
    """Authentication by munge."""

    def problem(self) -> str:
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
        except ValueError:  # a nonce or a text that no client of this package makes
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
