"""The container cluster as the demo uses it, through `contrib/cluster/cluster`."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from contrib.demo.errors import DemoError

ROOT = Path(__file__).resolve().parents[2]
#: Where the image keeps the project's tree.
PROJECT = "/opt/src/slurm-elastic"
#: Where the jobs of both users write.
STAGE = "/shared/scratch/demo"
_COMMAND = ROOT / "contrib" / "cluster" / "cluster"
_TIMEOUT_S = 120.0


class Cluster:
    """One cluster, by name.

    Args:
        name: as in `cluster --name`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._command = [str(_COMMAND), "--name", name]

    def is_up(self) -> bool:
        """Whether any of it runs."""
        done = subprocess.run([*self._command, "status"], capture_output=True, check=False)
        return done.returncode == 0

    def up(self) -> None:
        """Build what changed and start; its progress goes to stderr."""
        self._visible("up")

    def down(self) -> None:
        """Remove it; the image stays."""
        self._visible("down")

    def start_controller(self) -> None:
        """Start selasticd with the configuration that lies in ctld."""
        self._quiet("controller", "start")

    def run(self, script: str, *, user: str = "root", stdin: str | bytes = b"") -> str:
        """Run a bash script on ctld; what it prints.

        Raises:
            DemoError: it failed.
        """
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = self._exec(script, user, data)
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            why = said[-1] if said else "no message"
            raise DemoError(f"`{_first(script)} …` failed on the cluster: {why}")
        return done.stdout.decode(errors="replace")

    def stream(self, script: str) -> subprocess.Popen[bytes]:
        """A script on ctld whose output is read while it runs; it ends when it cannot write."""
        return subprocess.Popen(
            [*self._command, "exec", "--", "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends its helpers
        )

    def fetch(self, target: Path, names: Sequence[str]) -> None:
        """Copy these directories and files below STAGE into a directory here."""
        archive = self._exec(
            f"cd {STAGE} && tar -cf - --ignore-failed-read {' '.join(names)}", "root", b""
        ).stdout
        with tempfile.TemporaryFile() as file:
            file.write(archive)
            file.seek(0)
            _unpack(file, target)

    def _exec(self, script: str, user: str, data: bytes) -> subprocess.CompletedProcess[bytes]:
        words = [*self._command, "exec", "--user", user, "--", "bash", "-c", script]
        try:
            return subprocess.run(
                words, input=data, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            what = f"`{_first(script)} …` did not answer within {_TIMEOUT_S:.0f} s"
            raise DemoError(what) from None

    def _visible(self, *words: str) -> None:
        """A verb whose own progress and error line people see."""
        done = subprocess.run(
            [*self._command, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            raise DemoError(code=done.returncode)

    def _quiet(self, *words: str) -> None:
        done = subprocess.run([*self._command, *words], capture_output=True, check=False)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise DemoError(lines[-1] if lines else f"`cluster {words[0]}` failed")


def _first(script: str) -> str:
    """The command that a script begins with."""
    return script.split(maxsplit=1)[0]


def _unpack(file: IO[bytes], target: Path) -> None:
    try:
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise DemoError(f"what the jobs wrote could not be fetched: {error}") from None
