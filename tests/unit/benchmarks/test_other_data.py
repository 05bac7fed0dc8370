"""Benchmarks on other parts of the published data than those that are known here."""

import csv
import gzip
import shutil
import sys
from datetime import datetime, timedelta

import pytest

from benchmarks.colocation import __main__ as colocation
from benchmarks.helios import __main__ as helios
from benchmarks.helios import sleep_replay
from benchmarks.ones import __main__ as ones
from tests.support import published_data

FILES = {
    "helios": (helios.JOBS, helios.NODES, *sleep_replay.FILES),
    "ones": ones.FILES,
    "colocation": colocation.FILES,
}


@pytest.fixture
def changed(tmp_path):
    """Copies files of a set, each row changed or left out: its folder."""

    def copy(name, **changes):
        source = published_data.require(name, *FILES[name])
        target = tmp_path / name
        shutil.copytree(source, target)
        for stem, change in changes.items():
            (path,) = (p for p in target.iterdir() if p.name.startswith(stem))
            path.chmod(0o644)
            opened = gzip.open if path.suffix == ".gz" else open
            with opened(path, "rt", encoding="utf-8") as lines:
                rows = list(csv.DictReader(lines))
            kept = [new for number, row in enumerate(rows) if (new := change(number, row))]
            with opened(path, "wt", encoding="utf-8", newline="") as out:
                writer = csv.DictWriter(out, rows[0])
                writer.writeheader()
                writer.writerows(kept)
        return target

    return copy


@pytest.fixture
def said(monkeypatch, capsys, tmp_path):
    """Runs a benchmark on the changed data: its exit code, output and error."""

    def run(module, *words):
        monkeypatch.setattr(sys, "argv", ["benchmark", *words, "--data", str(tmp_path)])
        try:
            module.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


def earlier(row):
    at = datetime.fromisoformat(row["time"]) - timedelta(days=100)
    return row | {"time": str(at)}


def test_other_weeks_of_nodes_in_use(changed):
    folder = changed(
        "helios",
        philly_nodes=lambda n, row: earlier(row) if n >= 5000 else None,
        ces_reference=lambda n, row: earlier(row) if n < 1008 else None,
    )
    sleep = sleep_replay.figures(sleep_replay.read(folder))
    assert {row["days"] for row in sleep["rules"]} == {7, 24}
    assert all(row["known"] is None for row in sleep["rules"])
    assert sleep["known_error"] is None


def test_weeks_that_do_not_belong_together(changed, said):
    changed("helios", ces_reference=lambda _, row: earlier(row))
    code, out, error = said(helios, "--part", "sleep")
    assert (code, out) == (2, "")
    assert "philly_nodes_10min.csv has no bin at the first time of ces_reference.csv" in error


def test_other_jobs_have_no_reference(changed, said):
    changed("helios", philly_oct_nov=lambda n, row: row if n % 40 == 0 else None)
    code, out, _ = said(helios, "--part", "queues", "--divide", "2")
    assert code == 0
    fifo = next(line for line in out.splitlines() if " fifo " in line)
    assert len(fifo.split()) == 6, "a figure of other jobs stands beside it"


def test_a_job_of_an_unknown_virtual_cluster_is_named(changed, said):
    changed("helios", philly_oct_nov=lambda n, row: row | {"vc": "x9"} if n == 7 else row)
    code, out, error = said(helios, "--part", "queues", "--divide", "2")
    assert (code, out) == (2, "")
    assert "philly_oct_nov.csv.gz has jobs of x9, which is not in philly_vc.csv" in error


def test_other_trainings_of_ones(changed, said, monkeypatch):
    changed("ones", trace=lambda n, row: row if n >= 192 else None)
    nothing = dict.fromkeys(
        ("error_at_half", "error_by_mean_epochs", "log_likelihood", "log_likelihood_of_constant"), 0
    )
    monkeypatch.setattr(ones, "progress", lambda _: nothing)  # of the history, which is the same
    code, out, _ = said(ones)
    assert code == 0
    assert "   8   64  fcfs " in out
    assert "%" not in out, "a difference to figures of other jobs"


def test_a_training_without_history_is_named(changed, said):
    changed("ones", trace=lambda n, row: row | {"model": "new"} if n == 3 else row)
    code, out, error = said(ones)
    assert (code, out) == (2, "")
    assert "'new'" in error


def test_pairs_other_than_the_published_ones_have_no_reference_figures(changed, said, monkeypatch):
    quick = {name: colocation.PREDICTORS[name] for name in ("constant", "three terms")}
    monkeypatch.setattr(colocation, "PREDICTORS", quick)
    monkeypatch.setattr(colocation, "matchings", lambda *_: [])
    changed("colocation", pairs=lambda n, row: row if n % 3 else None)
    code, out, _ = said(colocation, "--draws", "2")
    assert code == 0
    (constant,) = (line for line in out.splitlines() if line.startswith("constant"))
    assert len(constant.split()) == 5, "figures of other pairs stand beside it"


def test_a_configuration_that_was_not_measured_alone_is_named(changed, said):
    changed("colocation", alone=lambda n, row: row if row["model"] != "ResNet18" else None)
    code, out, error = said(colocation)
    assert (code, out) == (2, "")
    assert "ResNet18" in error
