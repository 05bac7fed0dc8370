"""A real process is killed as after the loss of a companion, at each boundary of its save."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S
from slurm_elastic.job.unmodified.save_end import stop_between_saves
from tests.support.job.script_job import ScriptJob

#: Saves its step in two files; before each part of that it waits for a line.
SAVER = """
import json, os, sys
by_rename = sys.argv[1] == "rename"
step = 0
while True:
    step += 1
    for name in ("model.json", "optimizer.json"):
        text = json.dumps({"step": step, "weights": [step] * 5000})
        target = name + ".tmp" if by_rename else name
        parts = [text] if by_rename else [text[:9000], text[9000:]]
        input()
        with open(target, "w") as file:
            file.write(parts[0])
            if len(parts) > 1:
                file.flush()
                print("half", flush=True)
                input()
                file.write(parts[1])
        if by_rename:
            print("written", flush=True)
            input()
            os.replace(target, name)
        print("complete", flush=True)
"""
BOUNDARIES = ("before", "first-part", "between", "second-part", "after")


class Saver:
    """The process, and esrun's watch of its files."""

    def __init__(self, home: Path, manner: str) -> None:
        self.home = home
        self.job = ScriptJob(home, pattern="*.json")
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-c", SAVER, manner],
            cwd=home,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.done = 0
        for _ in range(3):
            for _ in range(4):
                self.go_on()
            self.job.now += FIRST_S
            self.job.watch.check()
        self.done = 0

    def go_on(self) -> None:
        """Let it do the next of the four parts of a save."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline()
        self.done += 1
        self.job.now += 1.0
        self.job.watch.check()

    def sleep(self, _: float) -> None:
        self.job.now += 0.1
        if self.done < 4:
            self.go_on()

    def kill(self) -> None:
        """Kill it as esrun does."""
        stop_between_saves(
            self.job.watch.is_saving,
            has_ended=lambda: self.process.poll() is not None,
            stop=lambda: os.kill(self.process.pid, signal.SIGSTOP),
            resume=lambda: os.kill(self.process.pid, signal.SIGCONT),
            sleep=self.sleep,
        )
        self.process.kill()
        self.process.wait()

    def steps(self) -> list[int]:
        """Return the step in each file; a torn one cannot be read."""
        names = ("model.json", "optimizer.json")
        return [json.loads((self.home / name).read_text())["step"] for name in names]


@pytest.fixture(params=["rename", "in-place"])
def manner(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def saver(tmp_path: Path, manner: str) -> Iterator[Saver]:
    saver = Saver(tmp_path, manner)
    yield saver
    saver.process.kill()
    saver.process.communicate()


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_no_checkpoint_is_torn_and_none_is_lost(saver: Saver, manner: str, boundary: str) -> None:
    for _ in range(BOUNDARIES.index(boundary)):
        saver.go_on()
    saver.kill()
    unchanged = ("before", "first-part") if manner == "rename" else ("before",)
    step = 3 if boundary in unchanged else 4
    assert saver.steps() == [step, step], "both files are of one save"
