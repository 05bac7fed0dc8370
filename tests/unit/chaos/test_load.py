"""Submission of the campaign's jobs while slurmctld is killed."""

import subprocess
from subprocess import CompletedProcess

import pytest

from tests.chaos import load as module
from tests.chaos.load import Load
from tests.chaos.schedule import Submission


class Cluster:
    """Answers of sbatch and squeue, one after the other."""

    def __init__(self, *answers):
        self.answers, self.jobs, self.commands = list(answers), [], []

    def exec(self, command, **_):
        program = command[0] if isinstance(command, list) else command.split()[0]
        if program == "mkdir":
            return None
        self.commands.append(program)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        code, text = answer
        return CompletedProcess(command, code, stdout=text)


@pytest.mark.parametrize(
    "lost", [(1, ""), subprocess.TimeoutExpired("sbatch", 90)], ids=["error", "silence"]
)
def test_a_job_whose_sbatch_got_no_answer_is_not_submitted_twice(lost, monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    cluster = Cluster(lost, (1, ""), (0, ""), (0, "first 3\nsecond 4\n"))
    load = Load(cluster)
    load.accepted["first"] = (3, 0.0)
    job = Submission(at=0.0, name="second", user="alice", kind="rigid", least=1, most=1, work=9)
    assert load.submit(job)
    assert cluster.commands == ["sbatch", "squeue", "squeue", "squeue"]
    assert load.accepted["second"][0] == 4


def test_a_job_that_slurmctld_does_not_have_is_submitted_again(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    cluster = Cluster((1, ""), (0, "first 3\n"), (0, "4\n"))
    load = Load(cluster)
    load.accepted["first"] = (3, 0.0)
    job = Submission(at=0.0, name="second", user="alice", kind="rigid", least=1, most=1, work=9)
    assert load.submit(job)
    assert cluster.commands == ["sbatch", "squeue", "sbatch"]
