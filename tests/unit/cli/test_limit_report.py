"""`selastic report`: time limits beside run times, from accounting or the controller."""

import json

import pytest

from slurm_elastic.cli import client, main
from tests.unit.cli.test_durations_cli import WEEK, accounting


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main.run(["report", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def test_a_file_of_accounting(run, tmp_path):
    path = accounting(tmp_path, 20)
    code, out, err = run(path)
    assert (code, err) == (0, "")
    header, row = out.splitlines()
    assert header.split()[:4] == ["USER", "NAME", "JOBS", "LIMIT"]
    assert row.split() == [
        "alice", "net", "20", "1-00:00:00", "00:10:00", "00:10:00", "0", "00:15:00", "950.0",
    ]  # fmt: skip
    (answer,) = json.loads(run(path, "--json")[1])["limits"]
    assert (answer["limit_s"], answer["advised_s"]) == (86400.0, 900.0)
    assert run(path, "-Pho", "name,advised")[1] == "net|00:15:00\n"


def test_what_cannot_be_told_is_one_line(run, tmp_path):
    assert run(accounting(tmp_path, 4))[1].startswith("no name has five jobs")
    for words, expected in (
        ((WEEK,), "no job has a time limit; export the column Timelimit"),
        ((accounting(tmp_path, 9), "-u", "bob"), "bob"),
        ((tmp_path / "none.txt",), "none.txt"),
        (("-S", "2026-01-01"), "--start needs FILE"),
    ):
        code, out, err = run(*words)
        assert code in (1, 2), words
        assert (out, err.count("\n")) == ("", 1)
        assert expected in err


def test_without_a_file_the_controller_is_asked(run, monkeypatch):
    row = {
        "user": "bob", "name": "gpt-#\x1b[2J", "jobs": 9, "limit_s": 3600.0, "median_s": 3599.0,
        "p90_s": 3600.0, "reached": 5, "advised_s": 4500.0, "gpu_hours": -2.25,
    }  # fmt: skip
    answer = {"enabled": True, "jobs": 30, "trained": 1.7e9, "problem": "", "limits": [row]}
    asked = []
    monkeypatch.setattr(client, "ask", lambda op, **args: asked.append((op, args)) or answer)
    _, line = run("-u", "bob")[1].splitlines()
    assert asked == [("limits", {"user": "bob"})]
    assert "\x1b" not in line
    assert line.split()[-3:] == ["5", "01:15:00", "-2.2"]
    answer["problem"] = "slurmdbd is away"
    assert run()[1].splitlines()[-1] == "sacct was not read: slurmdbd is away"
    answer |= {"problem": "", "trained": None}
    assert run()[1] == "run times are not known yet: sacct is being read\n"
    answer["enabled"] = False
    assert run()[1] == "run times are not read here: [durations] predict is false\n"
