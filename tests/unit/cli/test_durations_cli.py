"""`selastic durations`: errors of predictions from accounting; errors are one line."""

import json
from pathlib import Path

import pytest

from slurm_elastic.cli import client, main

WEEK = Path(__file__).parents[2] / "data" / "sacct-week.txt"
HEADER = "JobID|JobName|User|Partition|Submit|Start|End|ElapsedRaw|Timelimit|State|AllocTRES|NNodes"


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main.run(["durations", *map(str, words)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def accounting(tmp_path, jobs):
    rows = [
        f"{i}|net|alice|gpu|{1000 * i}|{1000 * i}|{1000 * i + 600}|600|1-00:00:00|COMPLETED"
        f"|gres/gpu=2|1"
        for i in range(1, jobs + 1)
    ]
    path = tmp_path / "month.txt"
    path.write_text("\n".join([HEADER, *rows]), encoding="utf-8")
    return path


def test_names_predict_a_week(run):
    code, out, err = run(WEEK)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("sacct-week.txt: 78 GPU jobs taken")
    assert " ".join(lines[2].split()) == "PREDICTION JOBS FACTOR_P50 FACTOR_P90 WITHIN_P90 RANK"
    assert lines[3].split()[:2] == ["rolling", "22"]
    assert "boosted needs" in lines[-1]


def test_limits_are_compared_where_the_file_has_them(run, tmp_path):
    code, out, _ = run(accounting(tmp_path, 20), "--json")
    assert code == 0
    rows = {r["prediction"]: r for r in json.loads(out)["predictions"]}
    assert rows["rolling"]["factor_p50"] == pytest.approx(1.0)
    assert rows["time limit"]["factor_p50"] == pytest.approx(144.0)


def test_without_a_file_the_controller_is_asked(run, monkeypatch):
    row = {"prediction": "rolling", "jobs": 9, "factor_p50": 1.5, "factor_p90": 3.0}
    answer = {
        "enabled": True,
        "jobs": 30,
        "trained": 1.7e9,
        "boosted": False,
        "problem": "sacct: no answer",
        "predictions": [{**row, "within_p90": 0.9, "rank": 0.8}],
    }
    monkeypatch.setattr(client, "ask", lambda op: answer)
    code, out, _ = run()
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("predicted by rolling estimates from 30 jobs, since 2023-11-1")
    assert lines[3].split() == ["rolling", "9", "1.50", "3.00", "90%", "0.80"]
    assert lines[-1] == "the last training failed: sacct: no answer"
    answer["enabled"] = False
    assert run()[1] == "run times are not predicted here: [durations] predict is false\n"
    answer |= {"enabled": True, "trained": None, "problem": ""}
    assert run()[1] == "run times are not predicted yet: the first training runs\n"


def test_table_options(run, tmp_path):
    path = accounting(tmp_path, 20)
    assert run(path, "-P", "-h", "-o", "prediction,rank")[1].startswith("rolling|0.00\n")


def test_one_job_predicts_nothing(run, tmp_path):
    code, _, err = run(accounting(tmp_path, 1))
    assert code == 1
    assert err.count("\n") == 1
    assert "no job was submitted after another had ended" in err


def test_a_missing_file_is_one_line(run, tmp_path):
    code, _, err = run(tmp_path / "none.txt")
    assert code == 2
    assert err.count("\n") == 1
