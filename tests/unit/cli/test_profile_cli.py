"""`selastic profile`: refusals, the submitted job, and the output."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from slurm_elastic.cli import client, main
from slurm_elastic.cli.exit_codes import CliError
from slurm_elastic.cli.profile import profile_report, profile_submission
from slurm_elastic.cli.tables import TableLayout
from slurm_elastic.profiler.profile_file import (
    MeasuredTime,
    ProfiledConfiguration,
    ProfiledUse,
    StepProfile,
    from_body,
    read,
)
from tests.support.process_state import is_alive


@pytest.fixture(autouse=True)
def _no_slurm(monkeypatch):
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)


#: A script that knows nothing of the library, and is fast and slow as it is told.
SCRIPT = """
import os
block = os.environ["SLURM_ELASTIC_PROFILE_BLOCKS"].split(",")[0]
seconds = {"synthetic": 2.0, "warm": 3.0, "cold": 6.0}[block]
seconds *= 1.5 if os.environ["WORLD_SIZE"] == "2" else 1.0
if os.environ["RANK"] == "0":
    print(f"selastic-profile: steps=20 seconds={seconds} batch=32", flush=True)
"""


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text('#!/bin/sh\nexec python3 -S -c "$(cat train.py)"\n')
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "data").write_bytes(b"x")
    return ["sh", "train.sh"]


def test_a_script_without_the_library_is_measured_on_this_machine(train, tmp_path, capsys):
    options = ["--shapes", "2", "--repeats", "1", "--data", "data", "--gpu-type", "v100"]
    assert main.run(["profile", *options, "--plot", "a.svg", *train]) == 0
    out, err = capsys.readouterr()
    assert "with one repeat the spread" in out.lower()
    assert "run 6 of 6" in err
    profile = read(tmp_path / "selastic-profile" / "profile.json")
    two = profile.configurations[1]
    assert (two.gpu_type, two.gpus, two.batch) == ("v100", 2, 32)
    times = [t.seconds for t in (two.compute, two.interconnect, two.network, two.prep, two.fetch)]
    assert times == pytest.approx([0.1, 0.05, 0.0, 0.075, 0.225])
    assert (tmp_path / "a.svg").read_text().count("interconnect") >= 1
    # Again: nothing is left to run, and the answer is the same.
    assert main.run(["profile", *options, "--json", *train]) == 0
    out, err = capsys.readouterr()
    assert "run 1" not in err
    assert json.loads(out)["configurations"][1]["fetch"] == {"seconds": 0.225, "spread": None}


@pytest.mark.parametrize("ok", [True, False])
def test_a_profile_is_sent_to_the_controller_that_answered_before(train, monkeypatch, capsys, ok):
    requests = []

    def ask(op, **args):
        requests.append((op, args))
        return {"results": [{"display_id": "4711", "ok": ok, "text": "1 configuration learned"}]}

    monkeypatch.setattr(client, "ask", ask)
    code = main.run(["profile", "--repeats", "1", "--send", "4711", *train])
    assert code == (0 if ok else 1)
    assert [op for op, _ in requests] == ["ping", "teach"]
    assert requests[1][1]["jobs"] == ["4711"]
    assert from_body(requests[1][1]["profile"]).configurations[0].batch == 32
    assert "job 4711: 1 configuration learned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "Missing argument"),
        (["--shapes", "3@2", "x"], '--shapes: "3@2" is invalid: expected equally many'),
        (["--shapes", "2@2", "x"], "--shapes 2@2 is invalid: the nodes have"),
        (["--data", "absent", "x"], "--data absent: no such file"),
        (["--plot", "a.gif", "x"], 'no format ".gif"'),
        (["--repeats", "0", "x"], "--repeats"),
        (["esrun", "python", "x.py"], "PROGRAM: esrun is invalid"),
    ],
)
def test_invalid_options_are_refused_in_one_line(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["profile", *arguments]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_missing_program_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["profile", "--repeats", "1", "no-such-program"]) == 1
    err = capsys.readouterr().err
    assert "no-such-program: not found" in err
    assert "no run on one GPU" in err
    assert "Traceback" not in err


def test_an_interrupt_ends_what_runs_and_keeps_the_rest(tmp_path):
    (tmp_path / "train.sh").write_text(
        """
        case $SLURM_ELASTIC_PROFILE_BLOCKS in
        synthetic*) echo 'selastic-profile: steps=20 seconds=2.0 batch=32' ;;
        *) echo $$ > pid.tmp; mv pid.tmp pid; exec sleep 600 ;;
        esac
        """
    )
    start = "from slurm_elastic.cli.main import main; main()"
    child = subprocess.Popen(
        [sys.executable, "-c", start, "profile", "sh", "train.sh"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (tmp_path / "pid").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "the same command continues" in err
    assert "Traceback" not in err
    assert (tmp_path / "selastic-profile" / "1-synthetic-1.json").exists()
    pid, last = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < last
        time.sleep(0.05)


def test_a_dry_run_shows_how_much_would_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main.run(["profile", "-n", "--shapes", "4", "python", "train.py", "--lr", "1"]) == 0
    out = capsys.readouterr().out
    assert "6 runs would be started" in out
    assert "4 GPUs, 3 times" in out
    assert list(tmp_path.iterdir()) == []


def test_the_new_job_runs_the_same_command(tmp_path):
    argv = ["selastic", "profile", "-p", "gpu", "--nodes", "2", "--time=5", "--steps", "9", "--",
            "python", "a b.py", "--nodes", "3"]  # fmt: skip
    inner_command = profile_submission.inner(argv)
    assert inner_command[1:] == [
        "profile",
        "--steps",
        "9",
        "--",
        "python",
        "a b.py",
        "--nodes",
        "3",
    ]
    job = profile_submission.ProfilingJob(
        partition="gpu", nodes=2, gpus_per_node="a100:4", time=None
    )
    command = profile_submission.sbatch(job, inner_command, tmp_path / "log")
    assert {"--partition=gpu", "--nodes=2", "--gpus-per-node=a100:4", "--ntasks-per-node=4"} <= set(
        command
    )
    assert command[-1].endswith("-- python 'a b.py' --nodes 3")
    with pytest.raises(CliError, match="expected 4 or a100:4"):
        profile_submission.sbatch(
            profile_submission.ProfilingJob(
                partition=None, nodes=1, gpus_per_node="many", time=None
            ),
            inner_command, tmp_path / "log",
        )  # fmt: skip


def test_noise_is_shown_where_it_may_hide_a_stall():
    profile = StepProfile(
        application="net\x1b[31m",
        configurations=(
            ProfiledConfiguration(
                gpu_type="a100", nodes=1, gpus=2, batch=8, repeats=3,
                compute=MeasuredTime(0.1, 0.001), interconnect=MeasuredTime(0.0, 0.02),
                network=MeasuredTime(0.0, 0.0), prep=MeasuredTime(0.05, 0.001), fetch=None,
                use=ProfiledUse(busy_cpus=2.5, memory_bytes_s=3e9, read_bytes_s=2e8, gpu_busy=0.9),
            ),
        ),
    )  # fmt: skip
    text = "\n".join(profile_report.lines(profile, TableLayout(), cold=False, whole_runs=False))
    assert "\x1b" not in text
    assert "none +-20 ms" in text
    assert "50 +-1.0 ms 33%" in text
    assert (
        "  2: 2.5 CPUs, 3 GB/s between memory and cache, 200 MB/s from storage, the GPU computes"
        " 90% of the time\n"
    ) in text
    assert "--repeats" in text
    row = profile_report.lines(
        profile, TableLayout(parsable=True, header=False), cold=False, whole_runs=False
    )
    assert row == ["2|1|a100|8|150 ms|100 +-1.0 ms 67%|none +-20 ms|none|50 +-1.0 ms 33%|-|1.00"]
