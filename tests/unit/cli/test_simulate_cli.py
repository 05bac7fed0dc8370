"""`selastic simulate` and `compare` from the command line to files and exit codes."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm_elastic.cli import main
from slurm_elastic.cli.simulate import simulation_answer
from slurm_elastic.cli.simulate.simulation_answer import SimulationAnswer, SimulationFigures
from slurm_elastic.core.reason import Reason
from tests.support import published_data

TOP = Path(__file__).parents[3]
WEEK = TOP / "tests" / "data" / "sacct-week.txt"
KEYS = {
    "avg_jct_h", "p50_jct_h", "p99_jct_h", "makespan_h", "gpu_h_per_job", "restarts_per_job",
    "policy_ms_p50", "policy_ms_p95", "cpu_s",
}  # fmt: skip
#: Small, so that tests are short: jobs of the smallest family on few GPUs.
CLUSTER = ("--cluster", "v100:2x4,a100:1x4")
#: What depends on the clock on the wall.
_TIMED = ("policy_ms_p50", "policy_ms_p95", "cpu_s")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("w") / "small.csv"
    arguments = ["--jobs", "8", "--hours", "0.3", "--mix", "resnet18=1", "-o", str(path)]
    assert main.run(["workload", "generate", *arguments]) == 0
    return path


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    """The first jobs of the invented accounting."""
    path = tmp_path_factory.mktemp("p") / "month.txt"
    path.write_text("".join(WEEK.read_text().splitlines(keepends=True)[:12]))
    return path


def _same(answer):
    return {k: v for k, v in answer.items() if k not in (*_TIMED, "each", "policies")}


def test_simulate_text_and_json(run, small):
    code, out, err = run("simulate", small, *CLUSTER, "--policy", "fair")
    assert (code, err) == (0, "")
    assert out.startswith("8 jobs of small, policy fair, on v100:2x4,a100:1x4 (12 GPUs)\n")
    assert "completion time" in out
    code, out, _ = run("simulate", small, *CLUSTER, "--policy", "fair", "--json")
    answer = json.loads(out)
    assert code == 0
    assert list(answer) == list(SimulationAnswer.__annotations__)
    assert list(answer["each"][0]) == list(SimulationFigures.__annotations__)
    assert (answer["jobs"], answer["workloads"]) == (8, ["small"])


def test_the_same_in_any_number_of_processes(run, small, tmp_path):
    other = tmp_path / "small.csv"
    other.write_text(small.read_text())
    answers = []
    for processes in (1, 2):
        code, out, err = run(
            "simulate", small, other, *CLUSTER, "--policy", "sia", "--json", "--jobs", processes
        )
        assert (code, err) == (0, "")
        answers.append(json.loads(out))
    assert _same(answers[0]) == _same(answers[1])
    assert [_same(a) for a in answers[0]["each"]] == [_same(a) for a in answers[1]["each"]]
    names = answers[0]["workloads"]
    assert len(set(names)) == 2  # told apart by their folders
    assert all(name.endswith("/small") for name in names)


def test_rows_per_job(run, small):
    code, out, _ = run("simulate", small, *CLUSTER, "--policy", "fair", "--jobs-csv", "-")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert len(rows) == 8
    assert all(float(r["completion_s"]) > float(r["submission_s"]) for r in rows)
    assert {r["application"] for r in rows} == {"resnet18"}


def test_class_clock_and_restarts_are_passed_on(run, small):
    def answer(*words):
        code, out, err = run("simulate", small, *CLUSTER, "--policy", "sia", "--json", *words)
        assert code == 0, err
        return json.loads(out)

    assert answer("--class", "rigid")["gpu_h_per_job"] != answer()["gpu_h_per_job"]
    assert answer("--clock", "event")["avg_jct_h"] < answer()["avg_jct_h"]
    assert answer("--restarts", "0")["gpu_h_lost_per_job"] == 0
    assert answer("--restarts", "600")["avg_jct_h"] > answer()["avg_jct_h"]


def test_compare(run, small):
    code, out, err = run("compare", small, *CLUSTER, "--policies", "sia,fair")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["POLICY", "sia", "fair"]
    assert "x1.00" in lines[2]
    code, out, _ = run("compare", small, *CLUSTER, "--policies", "sia,fair", "--json")
    answer = json.loads(out)
    assert (answer["first"], list(answer["policies"])) == ("sia", ["sia", "fair"])
    sia, fair = answer["policies"].values()
    assert set(fair) >= KEYS | {"ratio"}
    assert fair["ratio"]["avg_jct_h"] == pytest.approx(
        fair["avg_jct_h"] / sia["avg_jct_h"], rel=1e-4
    )


def test_compare_with_neighbours_runs_each_policy_twice(run, small, tmp_path):
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("application,other,speed\nresnet18,resnet18,0.5\n")
    arguments = ("compare", small, *CLUSTER, "--policies", "fair", "--neighbours", str(pairs))
    code, out, _ = run(*arguments, "--json")
    assert code == 0
    assert list(json.loads(out)["policies"]) == ["fair", "fair+apart"]


def test_compare_with_pairs_on_one_gpu(run, small, tmp_path):
    pairs = tmp_path / "pairs.csv"
    names = ("resnet18", "bert", "deepspeech2", "yolov3", "resnet50", "ncf")
    rows = [f"{a},{b},0.95\n" for a in names for b in names]
    pairs.write_text("application,other,speed\n" + "".join(rows))
    arguments = ("compare", small, "--cluster", "a100:1x1", "--policies", "fair,fifo")
    code, out, err = run(*arguments, "--gpu-pairs", str(pairs), "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)["policies"]
    assert list(answer) == ["fair", "fair+share", "fifo", "fifo+share"]
    assert answer["fair+share"]["avg_jct_h"] < answer["fair"]["avg_jct_h"]


def test_compare_with_sleeping_nodes(run, small):
    arguments = ("compare", small, *CLUSTER, "--policies", "fair", "--sleep")
    _, out, _ = run(*arguments)
    assert "fair: idle nodes could have slept 0.0 node hours" in out
    assert "nothing sleeps in the first 1 day" in out
    assert json.loads(run(*arguments, "--json")[1])["sleep"]["fair"]["late_nodes"] == 0


def test_compare_of_past_jobs(run, past):
    arguments = ("--sacct", past, "--cluster", "a100:2x8,v100:4x4", "--policies", "fair")
    code, out, err = run("compare", *arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("month.txt: 9 GPU jobs taken; left out: 1 never started")
    assert "pessimistic amdahl:0.9 .. optimistic amdahl:0.99" in lines[1]
    assert lines[3].startswith("as it was")
    answer = json.loads(run("compare", *arguments, "--json", "--scaling", "linear")[1])
    assert list(answer["policies"]["fair"]) == ["linear"]
    assert answer["as_it_was"]["avg_jct_h"] > 0


def test_jobs_larger_than_the_cluster_are_named(run, tmp_path):
    past = tmp_path / "two.txt"
    rows = (f"{i}|2026-10-01T00:00:00|600|gres/gpu={n}" for i, n in enumerate((64, 3), start=1))
    past.write_text("\n".join(["JobID|Submit|ElapsedRaw|AllocTRES", *rows]))
    arguments = ("--sacct", past, "--policies", "static", "--scaling", "linear")
    out = run("compare", *arguments, "--cluster", "gpu:2x8")[1]
    assert "1 of them asked for more GPUs than --cluster has of their type: here they run" in out
    answer = json.loads(run("compare", *arguments, "--cluster", "gpu:2x8", "--json")[1])
    assert answer["oversized"] == 1
    assert "asked for more" not in run("compare", *arguments, "--cluster", "gpu:8x8")[1]
    assert "write at least --cluster gpu:9x8" in run("compare", *arguments)[2]


def test_restarts_are_measured_by_application(run, past, tmp_path):
    """Also if each job has its own profile."""
    costs = tmp_path / "costs.csv"
    arguments = ("--sacct", past, "--cluster", "a100:2x8,v100:4x4", "--policies", "static")

    def lost(text):
        costs.write_text("application,checkpoint_s,slurm_s,start_s\n" + text)
        out = run("compare", *arguments, "--restarts", costs, "--scaling", "linear", "--json")[1]
        return json.loads(out)["policies"]["static"]["linear"]["gpu_h_lost_per_job"]

    assert lost("gpt-small,1,2,297\nother,0,0,0\n") > lost("gpt-small,1,2,3\nother,0,0,0\n") > 0


def test_jobs_that_do_not_scale_keep_their_run_time(run, past):
    """Rigid jobs on a cluster with room for all: only the clock's rounding is added."""
    arguments = ("--cluster", "a100:8x8,v100:8x4", "--scaling", "none", "--policies", "fair")
    answer = json.loads(run("compare", "--sacct", past, *arguments, "--json")[1])
    then, now = answer["as_it_was"], answer["policies"]["fair"]["none"]
    assert now["restarts_per_job"] == 0
    # The first start pays a restart of 60 s, and waits for a round; then nobody queues.
    assert now["avg_jct_h"] <= then["avg_jct_h"] + 0.05
    assert now["gpu_h_per_job"] == pytest.approx(then["gpu_h_per_job"], rel=0.05)


BAD = [
    (("simulate", "no.csv"), "no.csv: No such file"),
    (("simulate", "W", "--cluster", "foo"), 'cluster "foo"'),
    (("simulate", "W", "--cluster", "k80:2x4"), "built-in profiles have t4, v100, a100"),
    (("simulate", "W", "--policy", "sai"), '--policy: "sai" is unknown; known: '),
    (("simulate", "W", "--profiles", "nowhere", "--cluster", "a:1x1"), "nowhere: No such file"),
    (("simulate", "W", "--plot", "x.gif"), 'no format ".gif"'),
    (("simulate", "W", "--plot", "no/x.png"), "no such folder"),
    (("simulate", "W", "--jobs-csv", "no/x"), "--jobs-csv: no/x: no such folder"),
    (("simulate", "W", "--restarts", "-1"), "--restarts: -1 is invalid"),
    (("simulate", "W", "--restarts", "nofile"), "nofile: No such file"),
    (("simulate", "W", "--speeds", "a100"), "--speeds: "),
    (("simulate", "W", "--speeds", "a100=0"), "--speeds: a100=0 is invalid: expected a speed"),
    (("compare", "--sacct", "S", *CLUSTER, "--speeds", "a100=0"), "--speeds: a100=0 is invalid"),
    (("workload", "from-sacct", "S", "--speeds", "v100=0"), "--speeds: v100=0 is invalid"),
    (
        ("simulate", "S", *CLUSTER),
        "is accounting or a trace, no workload: selastic compare --sacct",
    ),
    (("simulate", "W", "--config", "nofile"), "nofile: No such file"),
    (("simulate", "W", "--class", "soft"), "--class"),
    (("simulate", "W", "--interval", "0"), "--interval"),
    (("simulate", "--profiles", "P", "--cluster", "a:1x1"), "WORKLOAD is missing; name one"),
    (("compare", "W", "--policies", "fair,fair"), "duplicate policy fair"),
    (("compare", "W", "--policies", "fair,"), '"" is unknown'),
    (("compare", "W", "--grow", "2"), "--grow needs --sacct"),
    (("compare", "W", "--start", "now"), "--start needs --sacct"),
    (("compare", "--sacct", "S", "--end", "x"), '--end: "x" is invalid: expected a time such as'),
    (("compare", "W", "--neighbours", "none.csv"), "--neighbours: none.csv: "),
    (("compare", "W", "--sacct", "S", "--policies", "fair"), "not both"),
    (("compare", "--sacct", "S", "--policies", "fair"), "at least --cluster a100:2x8,v100:3x4"),
    (
        ("compare", "--sacct", "S", "--policies", "fair", "--scaling", "x"),
        '"x" is invalid: expected a scaling',
    ),
    (("compare", "--sacct", "W", "--policies", "fair"), "small.csv:1: no header with JobID"),
    (("compare", "--sacct", "S", "--cluster", "a100:2x8", "--policies", "fair"), "ran on v100"),
]


@pytest.mark.parametrize(("words", "expected"), BAD, ids=[" ".join(w) for w, _ in BAD])
def test_bad_input_is_one_line(run, small, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    files = {"W": small, "S": WEEK, "P": tmp_path}
    code, out, err = run(*(files.get(w, w) for w in words))
    assert code == 2
    assert out == ""
    assert err.startswith("selastic: ")
    assert err.count("\n") == 1
    assert expected in err


def test_an_error_in_a_process_is_one_line(run, small, tmp_path):
    """A job that fits on no node fails when its simulation begins."""
    big = tmp_path / "big.csv"
    big.write_text(
        "name,time,application,num_replicas,batch_size,category\n"
        "resnet18-0,0,resnet18,64,4096,rigid\n"
    )
    code, _, err = run("simulate", small, big, *CLUSTER, "--policy", "fair", "--jobs", "2")
    assert code == 2
    assert err.startswith("selastic: big.csv:2: resnet18-0")
    assert err.count("\n") == 1


def test_help_does_not_wait_for_the_simulator():
    code = (
        "import sys; from slurm_elastic.cli import main; main.run(['simulate', '--help']);"
        "main.run(['compare', '--help']); main.run(['workload', 'generate', '--help']);"
        "print([m for m in ('numpy', 'scipy', 'highspy', 'matplotlib') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.endswith("[]\n")


def test_a_published_trace(run):
    sia = published_data.require("sia", "traces", "workloads")
    code, out, err = run(
        "simulate", sia / "workloads" / "philly" / "workload-1.csv", "--profiles", sia / "traces",
        "--cluster", "aws:6x4,dgx-ext:2x8,rtx:3x8", "--policy", "fifo", "--class", "rigid",
        "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["jobs"] == 160


def test_notes_are_reasons_and_each_sentence_stands_once():
    reason = Reason("holds-max", gpus=8)
    runs = [SimpleNamespace(notes=(reason, "net: assumed")), SimpleNamespace(notes=(reason,))]
    assert simulation_answer._notes(runs) == [
        {"code": "holds-max", "parameters": {"gpus": 8}},
        {"code": "text", "parameters": {"text": "net: assumed"}},
    ]


def test_changes_in_place_as_the_option_or_the_configuration_says(run, small, tmp_path):
    site = tmp_path / "site.toml"
    site.write_text('[resize]\nin_place = "auto"\n')
    arguments = ("simulate", small, *CLUSTER, "--policy", "sia", "--json")
    changes = [
        json.loads(run(*arguments, *more)[1])["in_place_per_job"]
        for more in ((), ("--in-place", "auto"), ("--config", site),
                     ("--config", site, "--in-place", "never"))
    ]  # fmt: skip
    assert changes[0] == changes[3] == 0
    assert changes[1] == changes[2] > 0
    code, out, _ = run(*arguments[:-1], "--in-place", "auto")
    assert code == 0
    assert "changes per job" in out


def test_racks_cost_what_crosses_them(run, small):
    arguments = ("simulate", small, *CLUSTER, "--policy", "fair", "--json")
    flat = json.loads(run(*arguments)[1])
    assert flat["crossing_gpu_h"] == 0
    racked = json.loads(run(*arguments, "--racks", 3, "--uplink-gbit", 1, "--congestion", 4)[1])
    assert racked["crossing_gpu_h"] > 0
    assert racked["avg_jct_h"] > flat["avg_jct_h"]
    one_rack = json.loads(run(*arguments, "--racks", 1, "--uplink-gbit", 1)[1])
    assert one_rack["crossing_gpu_h"] == 0
    code, out, _ = run(*arguments[:-1], "--racks", 3, "--uplink-gbit", 1)
    assert code == 0
    assert "GPU h lost to communication between racks" in out


@pytest.mark.parametrize(
    ("words", "rows", "line"),
    [
        (("--congestion", "4"), None, "--congestion needs --racks N"),
        (("--racks", "9"), None, "--racks 9 is invalid: expected 1 to 3, the nodes of"),
        (("--racks", "2"), "x,1", "no row for resnet18; add one, 0 if it sends nothing"),
        (("--racks", "2"), "resnet18,-1", "grads.csv:2: bytes '-1' is invalid: expected a number"),
        (
            ("--racks", "2"),
            "resnet18,1\nresnet18,2",
            "grads.csv:3: resnet18 occurs also in an earlier",
        ),
        (("--racks", "2"), "", "grads.csv: has no row; each line after the first is one"),
    ],
)
def test_invalid_racks_are_one_line(run, small, tmp_path, words, rows, line):
    if rows is not None:
        path = tmp_path / "grads.csv"
        path.write_text(f"application,bytes\n{rows}\n")
        words = (*words, "--gradient-bytes", path)
    code, out, err = run("simulate", small, *CLUSTER, *words)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1
