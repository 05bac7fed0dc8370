"""Fuzzing guided by coverage: atheris chooses the bytes behind a surface's random draws.

In a process of its own, since libFuzzer ends the one that it runs in.
"""

from __future__ import annotations

import importlib
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.tally import Tally

ROOT = Path(__file__).parents[2]


class Drawn(random.Random):
    """Random draws from given bytes; then from a generator seeded by them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._data, self._at = data, 0

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        part = self._data[self._at : self._at + size]
        if len(part) < size:
            return super().getrandbits(k)
        self._at += size
        return int.from_bytes(part, "big") >> (size * 8 - k)

    def random(self) -> float:
        part = self._data[self._at : self._at + 4]
        if len(part) < 4:
            return super().random()
        self._at += 4
        (number,) = struct.unpack("!I", part)
        return float(number) / 2**32


def run_guided(surface: str, seconds: float) -> Tally:
    """Fuzz one surface; its corpus is kept only while it runs."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        command = [
            sys.executable, "-m", "tests.fuzz.guided", surface, folder, f"-artifact_prefix={folder}/",
            f"-max_total_time={max(1, int(seconds))}", "-max_len=2048", "-print_final_stats=1",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    output = (done.stdout + done.stderr).decode(errors="replace")
    if "No module named 'atheris'" in output:
        raise SystemExit("--guided needs atheris: pip install atheris")
    counted = re.search(r"number_of_executed_units:\s*(\d+)", output)
    tally = Tally(int(counted[1]) if counted else 0)
    if done.returncode or not counted:
        tally.crashes.append(output[-2000:])
    cover = re.findall(r"cov: (\d+)", output)
    tally.notes["edges covered"] = int(cover[-1]) if cover else 0
    return tally


def main(surface: str, options: Sequence[str]) -> None:
    """Run in the child process."""
    import atheris

    with atheris.instrument_imports(include=["slurm_elastic"]):
        module = importlib.import_module(f"tests.fuzz.{surface}")
    from tests.fuzz import checked_log

    checked_log.quiet()
    atheris.Setup([surface, *options], lambda data: module.one(Drawn(data)) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
