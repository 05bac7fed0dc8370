"""How a training on GPUs ends: by SIGTERM with a checkpoint, and when one of its ranks is killed.

A rank that waits in a collective of NCCL runs no signal handler, so both are tried while the ranks
train. What is left of a killed training must not hinder the next one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.support.rank_processes import ROOT
from tests.gpu.part_program import STOPPED, part_main, read_lines, wait_until
from tests.gpu.part_runner import KitSetting
from tests.gpu.report_rows import RowWriter
from tests.support.process_state import is_alive

#: Steps that a start does before it is ended.
TURN = 20
#: An environment on a slow file system takes minutes to import.
_PATIENCE_S = 240.0
#: KillWait of Slurm by default: ranks that need longer are killed before they have saved.
KILL_WAIT_S = 30.0
#: esrun gives ranks 10 s to end before it kills them.
KILLED_S = 15.0


def run(setting: KitSetting, rows: RowWriter) -> None:
    """Start the training three times: ended by SIGTERM, by a killed rank, by SIGTERM again."""
    training = _Training(setting)
    with rows.trial("SIGTERM"):
        code, seconds = training.end(lambda child: child.send_signal(signal.SIGTERM))
        rows.check("SIGTERM: exit code", code, ok=code == STOPPED, expected=str(STOPPED))
        rows.at_most("SIGTERM: until all ranks have saved and ended", seconds, KILL_WAIT_S, "s")
        saved, done = training.saved(), training.steps()
        rows.check("SIGTERM: newest checkpoint", saved, ok=saved == done, expected=f"step {done}")
    with rows.trial("killed rank"):
        before = training.saved()
        code, seconds = training.end(lambda _: training.kill_last_rank())
        rows.check("killed rank: exit code", code, ok=code == 137, expected="137")
        rows.at_most("killed rank: until the others have ended", seconds, KILLED_S, "s")
        began = time.monotonic()
        left = training.alive()
        while left and time.monotonic() - began < KILLED_S:
            time.sleep(0.05)  # a killed process gives its GPU back before it is gone
            left = training.alive()
        rows.check("killed rank: processes left", left, ok=not left, expected="0")
        training.end(lambda child: child.send_signal(signal.SIGTERM))
        resumed = training.resumed_from()
        expected = f"step {before}, the newest checkpoint"
        rows.check("next start: continues after", resumed, ok=resumed == before, expected=expected)


class _Training:
    """One training, started again and again."""

    def __init__(self, setting: KitSetting) -> None:
        self._setting, self._folder = setting, setting.folder / "run"
        self._folder.mkdir()
        self._starts = 0

    def end(self, how: Any) -> tuple[int, float]:
        """Start it, end it after some steps; return the exit code, and the seconds it took."""
        self._starts += 1
        options = {"folder": str(self._folder), "start": self._starts}
        options["width"] = 32 if self._setting.small else 4096
        command = [sys.executable, str(ROOT / "wrappers" / "esrun"), "--local"]
        command += [str(self._setting.ranks), sys.executable, "-m", "tests.gpu.parts.stopping"]
        child = subprocess.Popen([*command, "--rank", json.dumps(options)], cwd=ROOT)
        try:
            wait_until(
                lambda: len(self._lines()) >= TURN or child.poll() is not None,
                f"step {TURN} of start {self._starts}",
                within_s=_PATIENCE_S,
            )
            if child.poll() is not None:
                raise RuntimeError(f"start {self._starts} ended with {child.returncode} by itself")
            began = time.monotonic()
            how(child)
            return child.wait(_PATIENCE_S), time.monotonic() - began
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()

    def kill_last_rank(self) -> None:
        """Kill the rank with the highest number."""
        os.kill(self.pids()[-1], signal.SIGKILL)

    def pids(self) -> list[int]:
        """Return the processes of the last start, by rank."""
        paths = self._folder.glob(f"pid-{self._starts}-*")
        return [int(path.read_text()) for path in sorted(paths)]

    def alive(self) -> int:
        """Return the number of running processes of the last start."""
        return sum(is_alive(pid) for pid in self.pids())

    def steps(self) -> int:
        """Return the last step that rank 0 has done."""
        return int(self._lines()[-1]["step"])

    def resumed_from(self) -> int:
        """Return the step after which the last start continued; 0: none."""
        return int(self._lines()[0]["resumed_from"] or 0)

    def saved(self) -> int:
        """Return the step of the newest checkpoint; 0: there is none."""
        steps = [int(path.name[5:]) for path in (self._folder / "ckpt").glob("step_*")]
        return max(steps, default=0)

    def _lines(self) -> list[dict[str, Any]]:
        return read_lines(self._folder / f"steps-{self._starts}.jsonl")


def rank(options: dict[str, Any]) -> None:
    """Train as one rank until it is ended."""
    from slurm_elastic.training import init  # noqa: PLC0415, I001 - before torch

    import torch  # noqa: PLC0415

    folder, start, width = Path(options["folder"]), options["start"], options["width"]
    (folder / f"pid-{start}-{int(os.environ['RANK']):03}").write_text(str(os.getpid()))
    layers = [torch.nn.Linear(16, width), *(torch.nn.Linear(width, width) for _ in range(4))]
    points = torch.randn(4096, 16)
    job = init(
        torch.nn.Sequential(*layers, torch.nn.Linear(width, 4)),
        torch.nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        torch.utils.data.TensorDataset(points, (points[:, 0] > 0).long()),
        global_batch=64,
        epochs=1_000_000,
        checkpoint_dir=folder / "ckpt",
        checkpoint_every_s=1e9,
    )
    # The run's first save would otherwise come in some seconds.
    job._checkpoint_manager.hurry()
    with (folder / f"steps-{start}.jsonl").open("a", buffering=1) as steps:
        for batch in job:
            job.step(batch)
            if job.rank == 0:
                line = {"step": batch.step, "resumed_from": job.resumed_from}
                steps.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    part_main(run, rank)
