"""The demo's container cluster, through `contrib/cluster/cluster`."""

from __future__ import annotations

import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
#: The project's tree in the image.
PROJECT = "/opt/src/slurm-elastic"
#: Folder in which the jobs of both users write.
SHARED_DIR = "/shared/scratch/demo"
_COMMAND = ROOT / "contrib" / "cluster" / "cluster"
_TIMEOUT_S = 120.0


class DemoError(Exception):
    """Failure that ends the demo with one line.

    Attributes:
        code: exit code. An empty message: the line has been printed already.
    """

    def __init__(self, message: str = "", code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class DemoCluster:
    """One container cluster.

    Args:
        name: as in `cluster --name`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._command = [str(_COMMAND), "--name", name]

    def is_up(self) -> bool:
        """Return whether any of its containers runs."""
        done = subprocess.run([*self._command, "status"], capture_output=True, check=False)
        return done.returncode == 0

    def up(self) -> None:
        """Build what has changed, and start; progress goes to stderr."""
        self._run_visibly("up")

    def down(self) -> None:
        """Remove it; the image stays."""
        self._run_visibly("down")

    def start_controller(self) -> None:
        """Start selasticd with the configuration file in ctld."""
        self._run_quietly("controller", "start")

    def run(self, script: str, *, user: str = "root", stdin: str | bytes = b"") -> str:
        """Run a bash script on ctld and return its output.

        Raises:
            DemoError: it failed.
        """
        data = stdin.encode() if isinstance(stdin, str) else stdin
        done = self._exec(script, user, data)
        if done.returncode:
            output = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            why = output[-1] if output else "no message"
            raise DemoError(f"`{_first_word(script)} …` failed on the cluster: {why}")
        return done.stdout.decode(errors="replace")

    def stream(self, script: str) -> subprocess.Popen[bytes]:
        """Start a script on ctld whose output is read while it runs."""
        return subprocess.Popen(
            [*self._command, "exec", "--", "bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the demo, which then ends its helpers
        )

    def fetch(self, target: Path, names: Sequence[str]) -> None:
        """Copy folders and files below SHARED_DIR into a local folder."""
        archive = self._exec(
            f"cd {SHARED_DIR} && tar -cf - --ignore-failed-read {' '.join(names)}", "root", b""
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
            problem = f"`{_first_word(script)} …` did not answer within {_TIMEOUT_S:.0f} s"
            raise DemoError(problem) from None

    def _run_visibly(self, *words: str) -> None:
        """Run a verb whose progress and error line are shown."""
        done = subprocess.run(
            [*self._command, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            raise DemoError(code=done.returncode)

    def _run_quietly(self, *words: str) -> None:
        done = subprocess.run([*self._command, *words], capture_output=True, check=False)
        if done.returncode:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise DemoError(lines[-1] if lines else f"`cluster {words[0]}` failed")


def _first_word(script: str) -> str:
    """Return the first word of a script."""
    return script.split(maxsplit=1)[0]


def _unpack(file: IO[bytes], target: Path) -> None:
    try:
        with tarfile.open(fileobj=file) as archive:
            archive.extractall(target, filter="data")
    except tarfile.TarError as error:
        raise DemoError(f"the files of the jobs could not be fetched: {error}") from None
