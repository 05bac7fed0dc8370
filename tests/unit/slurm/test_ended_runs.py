"""Ended runs from sacct: names cannot forge rows; requeued jobs; bounded reading."""

import re

import pytest

from slurm_elastic.slurm import ended_runs
from slurm_elastic.slurm.accounting import AccountingError
from slurm_elastic.slurm.scontrol import SlurmUnreachableError

NAMES = ("net", "a|b", "\n9|root|gpu|1|2|3|4|5|COMPLETED|gres/gpu=1|x|", "", "x" * 5000, "\x1f\x00")


def row(job=7, name="net", state="COMPLETED", start="20", end="50", gpus="gres/gpu=2", limit="60"):
    return (str(job), "al", "gpu", "10", start, end, "30", limit, state, gpus, name)


def shown(rows, separator):
    return "".join(separator.join((*r, "")) + "\n" for r in rows)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_field_whatever_it_holds(name):
    text = shown([row(name=name), row(job=8)], "<drawn>")
    runs = list(ended_runs.parse(text, "<drawn>"))
    assert [(r.job_id, r.user, r.name) for r in runs] == [(7, "al", name[:200]), (8, "al", "net")]


def test_jobs_without_gpus_an_end_or_a_start_are_left_out():
    rows = [
        row(gpus="cpu=4"),
        row(end="Unknown", state="RUNNING"),
        row(start="None"),
        row(job=9, limit="UNLIMITED", state="CANCELLED by 0"),
    ]
    (run,) = ended_runs.parse(shown(rows, "#"), "#")
    assert (run.job_id, run.limit_s, run.state) == (9, None, "CANCELLED")


def test_an_answer_that_was_cut_loses_its_last_row_only():
    text = shown([row(), row(job=8)], "#")[:-30]
    assert [r.job_id for r in ended_runs.parse(text, "#")] == [7]


def test_runs_of_a_job_belong_together_and_requeued_ones_have_not_ended():
    rows = [row(state="REQUEUED"), row(start="60", end="90"), row(job=8, state="REQUEUED")]
    lives = list(ended_runs.by_job(ended_runs.parse(shown(rows, "#"), "#")))
    assert [[(r.job_id, r.start) for r in life] for life in lives] == [[(7, 20.0), (7, 60.0)]]


def test_days_are_read_from_the_newest_until_there_are_enough(monkeypatch):
    calls = []

    def output(*words, timeout_s, shown):
        (separator,) = (w.partition("=")[2] for w in words if w.startswith("--delimiter="))
        calls.append(separator)
        number = len(calls)
        rows = [row(job=10 * number + i, end=str(1000 - number)) for i in range(3)]
        return "".join(separator.join((*r, "")) + "\n" for r in rows).encode()

    monkeypatch.setattr(ended_runs, "output", output)
    runs = ended_runs.read(days=30, most=7, timeout_s=60)
    assert len(calls) == len(set(calls)) == 3
    assert all(re.fullmatch(r"\x1f[0-9a-f]{32}\x1f", separator) for separator in calls)
    assert len(runs) == 7
    assert runs[-1].end == 999.0


def test_a_failure_is_one_line(monkeypatch):
    def output(*words, timeout_s, shown):
        raise SlurmUnreachableError("sacct: slurmdbd does not answer")

    monkeypatch.setattr(ended_runs, "output", output)
    with pytest.raises(AccountingError, match="slurmdbd does not answer"):
        ended_runs.read(days=1, most=10, timeout_s=5)
