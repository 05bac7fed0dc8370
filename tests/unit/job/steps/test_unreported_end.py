"""Ends of steps that srun is not told of: what slurmctld lists and the accounting says decides."""

import os
import subprocess
import time

import pytest

from slurm_elastic.job.launch import SrunProcess
from slurm_elastic.job.steps.step import Step
from slurm_elastic.job.steps.unreported_end import (
    UnreportedEndWatch,
    ask,
    listed_steps,
    recorded_code,
)

JOB = 7
LIMIT_S = 30.0
BATCH = (
    "StepId=7.batch UserId=1 State=RUNNING Nodes=1 CPUs=0 Tasks=1 Name=batch SrunHost:Pid=(null):0"
)


class Slurm:
    """Answers of scontrol and sacct about one step, whose ranks are one process."""

    def __init__(self, *, listed: bool = True, recorded: str = "COMPLETED|0:0") -> None:
        self.step = Step(SrunProcess(["sleep", "60"], os.environ, "mark"))
        self.rank = subprocess.Popen(["sleep", "60"])
        self.is_listed, self.recorded, self.answers = listed, recorded, True
        self.asked: list[str] = []

    def ask(self, command):
        self.asked.append(command[0])
        if command[0] == "sacct":
            return f"7|RUNNING|0:0\n7.batch|RUNNING|0:0\n7.3|{self.recorded}\n"
        if not self.answers:
            return None
        pid = self.step.child.pid
        mine = f"\nStepId=7.3 UserId=1 State=RUNNING Name=python3 SrunHost:Pid=g01:{pid}"
        return BATCH + (mine if self.is_listed else "") + "\n"

    def ranks(self):
        return [self.rank.pid] if self.rank.poll() is None else []

    def end_rank(self):
        self.rank.kill()
        self.rank.wait()

    def watch(self, **more):
        watch = UnreportedEndWatch(
            lambda: [] if self.step.ends_within(0) else [(JOB, self.step)],
            self.ranks,
            ask=self.ask,
            pause_s=0.05,
            silent_s=0.1,
            **more,
        )
        watch.start()
        return watch

    def until_asked(self, count):
        end = time.monotonic() + LIMIT_S
        while len(self.asked) < count:
            assert time.monotonic() < end, self.asked
            time.sleep(0.02)


@pytest.fixture
def slurm():
    slurm = Slurm()
    yield slurm
    slurm.end_rank()
    slurm.step.send(9)


@pytest.mark.parametrize(
    ("recorded", "code"), [("COMPLETED|0:0", 0), ("FAILED|3:0", 3), ("CANCELLED by 5|0:9", 137)]
)
def test_a_step_that_slurmctld_no_longer_lists_ends_as_the_accounting_says(slurm, recorded, code):
    slurm.recorded = recorded
    watch = slurm.watch()
    slurm.until_asked(1)  # its name, while it is listed
    slurm.end_rank()
    slurm.is_listed = False
    assert slurm.step.wait() == code
    watch.end()


def test_a_step_that_is_listed_goes_on_and_so_does_one_of_an_unreachable_slurmctld(slurm):
    watch = slurm.watch()
    slurm.until_asked(1)
    slurm.end_rank()
    slurm.until_asked(3)
    slurm.answers = slurm.is_listed = False
    slurm.until_asked(5)
    assert not slurm.step.ends_within(0.0)
    assert "sacct" not in slurm.asked
    watch.end()


def test_slurmctld_is_not_asked_again_while_a_rank_runs_here(slurm):
    watch = slurm.watch()
    slurm.until_asked(1)
    time.sleep(0.5)
    assert slurm.asked == ["scontrol"]
    watch.end()


def test_a_step_whose_end_the_accounting_does_not_know_has_failed(slurm, capfd):
    slurm.recorded = "RUNNING|0:0"
    watch = slurm.watch(accounting_s=0.3)
    slurm.until_asked(1)
    slurm.end_rank()
    slurm.is_listed = False
    assert slurm.step.wait() == 1
    watch.end()
    assert "does not say how step 7.3 ended" in capfd.readouterr().err


def test_what_slurm_prints_about_others_is_left_out():
    assert listed_steps(f"{BATCH}\nStepId=7.0 State=RUNNING SrunHost:Pid=n1:12\n") == {
        0: "7.batch", 12: "7.0",
    }  # fmt: skip
    assert recorded_code("7.1|COMPLETED|0:0\n", "7.10") is None
    assert recorded_code("", "7.1") is None


def test_a_command_that_fails_or_is_not_there_has_no_answer():
    assert ask(["false"]) is None
    assert ask(["/nonexistent/scontrol"]) is None
    assert ask(["echo", "x"]) == "x\n"
