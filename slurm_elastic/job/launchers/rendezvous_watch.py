"""Detection of ranks that do not train together.

A program that was written for one process runs under esrun once per GPU: each rank trains alone,
and all write the same checkpoints. torch.distributed with the ranks' environment makes rank 0
listen at MASTER_PORT. Programs that meet in another way cannot be told apart, so the result is a
line in the log and no more. What their checkpoints show beside that: `lone_ranks`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

#: Seconds until ranks that have begun to train must have met (our choice).
_MEET_S = 180.0
#: Seconds if nothing shows whether they have begun: the import of a framework takes minutes on a
#: file system that many jobs read at once (our choice).
UNSEEN_S = 900.0
_PAUSE_S = 5.0
_TABLES = ("tcp", "tcp6")
#: States of a socket in the kernel's tables: it listens, or is connected.
_LISTENS, _CONNECTED = "0A", "01"
#: Characters of an address's last four bytes, a colon, and the port.
_END = 8 + 1 + 4


def listens(port: int, folder: Path = Path("/proc/net")) -> bool:
    """Return whether a socket of this host listens at a port; True if that cannot be read."""
    try:
        return port in listening_sockets(folder).values()
    except OSError:
        return True


def listening_sockets(folder: Path) -> dict[str, int]:
    """Return the port at which each socket listens for TCP, by its inode.

    Args:
        folder: of the kernel's tables, such as /proc/net.

    Raises:
        OSError: none can be read.
    """
    rows = _rows(folder, _LISTENS)
    return {inode: int(local.rpartition(":")[2], 16) for inode, (local, _) in rows.items()}


def connections(folder: Path) -> dict[str, tuple[str, str]]:
    """Return both ends of each TCP connection, the own one first, by the inode of its socket.

    An end is the last four bytes of its address and the port: so that of IPv4 is equal in both
    tables of the kernel.

    Args:
        folder: of the kernel's tables, such as /proc/net.

    Raises:
        OSError: none can be read.
    """
    rows = _rows(folder, _CONNECTED)
    return {i: (local[-_END:], remote[-_END:]) for i, (local, remote) in rows.items()}


def _rows(folder: Path, wanted: str) -> dict[str, tuple[str, str]]:
    """Return both ends of the TCP sockets in a state, by their inodes.

    Raises:
        OSError: no table can be read.
    """
    sockets: dict[str, tuple[str, str]] = {}
    problem: OSError | None = None
    for name in _TABLES:
        try:
            lines = (folder / name).read_text("ascii", "replace").splitlines()[1:]
        except OSError as error:
            if problem is not None:
                raise
            problem = error
            continue
        for line in lines:
            _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
            if state == wanted:
                sockets[inode] = (local, remote)
    return sockets


class RendezvousWatch:
    """Watch of one step, of several ranks, in the background.

    Args:
        port: MASTER_PORT of the step, whose rank 0 runs on this host.
        on_missing: called once if nothing has listened there in time.
        has_begun: returns whether the ranks show that they train. Those that are still importing
            their framework have not met yet.
        meet_s: seconds that they have at least.
        pause_s: between two looks.
    """

    def __init__(
        self,
        port: int,
        on_missing: Callable[[], object],
        *,
        has_begun: Callable[[], bool] = lambda: True,
        meet_s: float = _MEET_S,
        pause_s: float = _PAUSE_S,
    ) -> None:
        self._port, self._on_missing = port, on_missing
        self._has_begun, self._meet_s, self._pause_s = has_begun, meet_s, pause_s
        self._ended = threading.Event()

    def start(self) -> None:
        """Start the watch."""
        threading.Thread(target=self._run, name="rendezvous", daemon=True).start()

    def end(self) -> None:
        """End the watch: the step has ended."""
        self._ended.set()

    def _run(self) -> None:
        end = time.monotonic() + self._meet_s
        while not self._ended.wait(self._pause_s):
            if listens(self._port):
                return
            if time.monotonic() > end and self._has_begun():
                self._on_missing()
                return
