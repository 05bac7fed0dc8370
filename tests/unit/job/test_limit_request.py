"""Advice at submission: what esbatch asks, and how it says the answer."""

import pytest

from slurm_elastic.job import limit_request
from slurm_elastic.rpc import frames

ANSWER = {
    "enabled": True,
    "length": {"median_s": 4000.0, "p90_s": 9000.0, "basis": "same-name", "jobs": 37},
    "advised_limit_s": 12000.0,
}


@pytest.fixture
def asked(monkeypatch):
    requests, answers = [], [ANSWER]

    def call(address, request, *, timeout_s):
        requests.append(request)
        answer = answers[-1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(frames, "call", call)
    return requests, answers


def test_the_job_is_described_by_sbatchs_options(asked):
    values = {"-J": "net", "gres": "gpu:a100:4", "nodes": "2", "time": "1-0", "partition": "gpu"}
    text = limit_request.advice("here:1", values, "train.sbatch")
    (request,) = asked[0]
    fields = {k: request[k] for k in ("op", "name", "gpus", "partition", "limit_s")}
    expected = {"op": "durations", "name": "net", "gpus": 8, "partition": "gpu", "limit_s": 86400.0}
    assert fields == expected
    assert text == (
        "half of such jobs end within 01:07:00, 90 % within 02:30:00 (37: your earlier jobs of this"
        " name); --time=03:20:00 would do, 1-00:00:00 is asked for"
    )


def test_the_script_names_the_job_by_default(asked):
    limit_request.advice("here:1", {"gpus": "a100:3"}, "dir/train.sbatch")
    assert (asked[0][0]["name"], asked[0][0]["gpus"]) == ("train.sbatch", 3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"enabled": False, "length": None, "advised_limit_s": None}, "does not predict"),
        ({"enabled": True, "length": None, "advised_limit_s": None}, "nothing is known"),
        ({"enabled": True}, "cannot be read"),
        (frames.ControllerUnreachableError("controller here:1: no answer"), "no answer"),
    ],
)
def test_without_an_answer_there_is_one_line(asked, answer, expected):
    asked[1].append(answer)
    text = limit_request.advice("here:1", {}, None)
    assert text.startswith("no advice: ")
    assert expected in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 5400), ("90:30", 5430), ("1-", None), ("1-2:3:4", 93784), ("x", None), ("", None)],
)
def test_limits_are_read_as_sbatch_reads_them(text, expected):
    assert limit_request.seconds(text) == expected
