"""A munged for the tests, with its own key and socket."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_elastic.rpc import munge_auth
from tests.support.needs import require
from tests.support.patience import PATIENCE_S


@dataclass(frozen=True)
class MungeDaemon:
    """A running munged."""

    socket: Path
    pid: int


@contextmanager
def munged() -> Iterator[MungeDaemon]:
    """Run a munged; skip where munge is not installed."""
    program = require("munged")
    with tempfile.TemporaryDirectory(prefix="munge-") as name:
        home = Path(name)
        home.chmod(0o755)  # the socket is for every user
        (home / "key").write_bytes(os.urandom(128))
        (home / "key").chmod(0o600)
        socket = home / "socket"
        files = (f"--{file}-file={home / file}" for file in ("key", "pid", "seed"))
        with subprocess.Popen(
            [program, "--foreground", "--force", f"--socket={socket}", *files],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                _wait_for(socket, process)
                yield MungeDaemon(socket, process.pid)
            finally:
                process.terminate()


def _wait_for(socket: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not socket.exists():
        if process.poll() is not None or time.monotonic() > end:
            pytest.skip(f"munged does not start here (exit code {process.returncode})")
        time.sleep(0.02)


@contextmanager
def environment(socket: Path) -> Iterator[None]:
    """Name the socket in the environment variable that munge_auth reads."""
    before = os.environ.get(munge_auth.SOCKET_VARIABLE)
    os.environ[munge_auth.SOCKET_VARIABLE] = str(socket)
    try:
        yield
    finally:
        if before is None:
            del os.environ[munge_auth.SOCKET_VARIABLE]
        else:
            os.environ[munge_auth.SOCKET_VARIABLE] = before
