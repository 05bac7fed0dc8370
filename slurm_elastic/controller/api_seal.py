"""Opens requests and closes replies: `slurm_elastic.job.channel` from the controller's side."""

from __future__ import annotations

from typing import Any, Protocol

from slurm_elastic.job import channel, seal
from slurm_elastic.job.channel import Message


class SealsError(Exception):
    """What arrived is no sealed request, or munge does not answer; the text says which."""


class Seals(Protocol):
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


class MungeSeals:
    """Munge's."""

    def trouble(self) -> str:
        """See `Seals`."""
        try:
            seal.seal(b"", purpose="trial", nonce="0")
        except seal.SealError as error:
            return str(error)
        return ""

    def open(self, frame: bytes) -> Message:
        """See `Seals`."""
        try:
            return channel.decode(frame, purpose="request")
        except seal.SealError as error:
            raise SealsError(str(error)) from None
        except ValueError:  # a nonce or a text that no client of ours makes
            raise SealsError("the request cannot be read") from None

    def close(self, reply: dict[str, Any], request: Message) -> bytes:
        """See `Seals`."""
        try:
            return self._close(reply, request)
        except channel.ChannelError as error:
            line = f"{error}: ask for less"
            return self._close({"error": line, "code": "too_large"}, request)
        except seal.SealError as error:
            raise SealsError(str(error)) from None

    def _close(self, reply: dict[str, Any], request: Message) -> bytes:
        return channel.encode(
            reply,
            purpose="reply",
            nonce=request.nonce,
            limit=channel.MAX_REPLY,
            uid=request.uid,
        )
