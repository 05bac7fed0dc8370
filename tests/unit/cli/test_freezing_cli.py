"""`selastic simulate --freezing` from the command line."""

import json

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.simulate import simulation_options
from slurm_elastic.simulator.truth.freezing_truth import BELIEFS

CLUSTER = ("--cluster", "v100:2x4,a100:1x4")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("w") / "small.csv"
    arguments = ["--jobs", "6", "--hours", "0.3", "--mix", "resnet18=1", "-o", str(path)]
    assert main.run(["workload", "generate", *arguments]) == 0
    return path


def test_the_option_has_all_assumptions():
    assert set(simulation_options._BELIEFS) == set(BELIEFS)


def test_frozen_layers_are_shown_with_the_option_only(run, small):
    code, out, err = run("simulate", small, *CLUSTER, "--policy", "icefrog", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["freezing_lost"] is None
    plain = json.loads(out)["avg_jct_h"]
    arguments = ("simulate", small, *CLUSTER, "--policy", "icefrog", "--freezing", "optimistic")
    code, out, _ = run(*arguments, "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["avg_jct_h"] < plain
    assert 0 < answer["freezing_layers"] < 1
    assert 0 < answer["freezing_lost"] < 0.02
    code, out, _ = run(*arguments)
    (line,) = [row for row in out.splitlines() if row.startswith("  freezing ")]
    assert line.endswith("% more progress to make for it")


def test_unknown_assumptions_and_gangs_are_refused_in_one_line(run, small):
    code, out, err = run("simulate", small, *CLUSTER, "--freezing", "hopeful")
    assert (code, out) == (2, "")
    assert "'hopeful' is not one of 'pessimistic', 'central', 'optimistic'" in err
    code, out, err = run(
        "simulate",
        small,
        "--format",
        "dally",
        "--cluster",
        "2x4x8",
        "--slowdown",
        "none",
        "--freezing",
        "central",
    )
    assert (code, out) == (2, "")
    assert "--freezing does not apply to --format dally; leave it out" in err
    assert err.count("\n") == 1
