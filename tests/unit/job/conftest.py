"""A munged of our own, where munge is installed."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.rpc import munge_auth
from tests.support.needs import require


@pytest.fixture(scope="session")
def munged() -> Iterator[dict[str, str]]:
    """A running munged: the path of its socket, and its process id."""
    program = require("munged")
    with tempfile.TemporaryDirectory(prefix="munge-") as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "key").write_bytes(os.urandom(128))
        (home / "key").chmod(0o600)
        files = {
            option: f"--{option}-file={home / option}" for option in ("key", "pid", "log", "seed")
        }
        subprocess.run(
            [program, "--force", f"--socket={home / 'socket'}", *files.values()],
            check=True,
            capture_output=True,
        )
        pid = (home / "pid").read_text().strip()
        yield {"socket": str(home / "socket"), "pid": pid}
        subprocess.run([program, f"--socket={home / 'socket'}", "--stop"], check=False)


@pytest.fixture
def munge(munged: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Seals go through our munged in this test."""
    monkeypatch.setenv(munge_auth.SOCKET_VARIABLE, munged["socket"])
    return munged
