"""The example scripts, started as by a user."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

import check_run  # noqa: E402
import emulate  # noqa: E402

from slurm_elastic.core.directive import Directive  # noqa: E402
from tests.support.trainings.forked_scripts import run_forked  # noqa: E402
from tests.support.trainings.training_runs import unused_port  # noqa: E402

SMALL = ("--samples", "96", "--epochs", "2", "--global-batch", "24")


def run(script: str, *arguments: str, forked: bool = True, **environment: str) -> str:
    env = os.environ | {"OMP_NUM_THREADS": "1", "EMULATED_DEVICES": "/absent"} | environment
    if forked:
        done = run_forked(EXAMPLES / script, *arguments, env=env)
    else:
        done = subprocess.run(
            [sys.executable, EXAMPLES / script, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of a complete run of train_library.py."""
    out = tmp_path_factory.mktemp("library")
    run("train_library.py", "--out", str(out), *SMALL, forked=False)
    return out


def test_a_complete_run_passes_the_check(finished: Path) -> None:
    stdout = run("check_run.py", str(finished), "--samples", "96", "--epochs", "2", forked=False)
    assert stdout == "every sample once per epoch, no step twice: 8 steps, ranks 1\n"


def _drop(lines: list[str]) -> list[str]:
    return lines[:3] + lines[4:]


def _repeat(lines: list[str]) -> list[str]:
    return [*lines, lines[2]]


@pytest.mark.parametrize(
    ("damage", "message"), [(_drop, "24 samples never seen"), (_repeat, "step 3 was computed 2")]
)
def test_the_check_reports_missing_and_repeated_steps(
    finished: Path, tmp_path: Path, damage, message
) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    log = out / "samples-rank0.jsonl"
    log.write_text("".join(damage(log.read_text().splitlines(keepends=True))))
    assert message in "; ".join(check_run.faults(out, 96, 2))


def test_the_plain_script_resumes_from_its_own_checkpoint(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--save-every", "3")
    run("train_plain.py", *out, *SMALL)
    whole = check_run.losses(tmp_path)
    for name in ("step_000008.pt", "step_000006.pt"):
        (tmp_path / "ckpt" / name).unlink()
    (tmp_path / "losses.jsonl").unlink()
    assert "rank 0 of 1: resumed from step_000003.pt" in run("train_plain.py", *out, *SMALL)
    assert check_run.losses(tmp_path) == {s: v for s, v in whole.items() if s > 3}


def test_the_gpt_example_trains_and_then_generates_text(tmp_path: Path) -> None:
    small = ("--out", str(tmp_path), "--samples", "64", "--epochs", "3", "--blocks", "1", "--tied")
    stdout = run("train_gpt.py", *small)
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert {line["layout"] for line in lines} == {"1x1"}
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert re.search("^generated: [a-z. ]{200}$", stdout, re.MULTILINE)
    # Complete: there is nothing left to train.
    assert "generated: " in run("train_gpt.py", *small)
    assert len((tmp_path / "losses.jsonl").read_text().splitlines()) == 6


def test_the_unmodified_script_trains() -> None:
    stdout = run("train_unmodified.py", "--samples", "96", "--epochs", "2")
    assert re.fullmatch(r"(epoch \d with 1 rank\(s\): loss \d\.\d{4}\n){2}", stdout)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("train_*.py")), ids=lambda path: path.stem)
def test_each_training_has_a_batch_script_and_is_in_the_table(script: Path) -> None:
    batch = script.with_suffix(".sbatch")
    subprocess.run(["bash", "-n", batch], check=True)
    text = batch.read_text()
    found = re.search(r"^#SBATCH --elastic=(\S+)$", text, re.MULTILINE)
    assert found
    Directive.parse(found[1])
    assert f'python3 "$EXAMPLES/{script.name}"' in text
    assert f"[{script.name}]({script.name})" in (EXAMPLES / "README.md").read_text()


DEVICES = """
speed = {v100 = 1.0, a100 = 2.0}
communication = {gpu = 0.0, node = 0.005, rack = 0.02, spine = 0.08}
types = {g01 = "a100", g02 = "v100", g03 = "v100"}
racks = {g01 = "rack1", g02 = "rack1", g03 = "rack2"}
"""


@pytest.mark.parametrize(
    ("here", "nodes", "world", "expected"),
    [
        ("g01", "g01", 1, ("a100", 320.0, 0.0)),
        ("g02", "g02", 4, ("v100", 160.0, 0.005)),
        ("g01", "g[01-02]", 8, ("a100", 320.0, 0.02)),
        ("g02", "g[01-03]", 12, ("v100", 160.0, 0.08)),
    ],
)
def test_an_emulated_device_follows_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, nodes: str, world: int, expected
) -> None:
    file = tmp_path / "devices.toml"
    file.write_text(DEVICES)
    monkeypatch.setattr(emulate, "SLURM_CONF", tmp_path / "absent")
    for name, value in {
        "EMULATED_DEVICES": str(file),
        "SLURMD_NODENAME": here,
        "SLURM_STEP_NODELIST": nodes,
        "WORLD_SIZE": str(world),
    }.items():
        monkeypatch.setenv(name, value)
    device = emulate.device(160.0)
    assert device is not None
    assert (device.kind, device.samples_per_s, device.communication_s) == expected


def test_the_device_file_of_the_container_cluster_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    file = EXAMPLES.parents[1] / "contrib" / "cluster" / "devices.toml"
    monkeypatch.setenv("EMULATED_DEVICES", str(file))
    monkeypatch.setenv("EMULATED_TYPE", "a100")
    device = emulate.device(100.0)
    assert device is not None
    assert device.samples_per_s == 200.0
    even = emulate.device(100.0, "even")
    assert even is not None
    assert (even.kind, even.samples_per_s) == ("a100", 100.0)


def test_an_emulated_step_takes_its_time(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text("speed = {v100 = 1.0}\ncommunication = {gpu = 0.01}\n")
    begun = time.monotonic()
    run(
        "train_library.py", "--out", str(tmp_path / "out"), *SMALL, "--rate", "240",
        EMULATED_DEVICES=str(file),
    )  # fmt: skip
    # 8 steps of 24 samples at 240 samples/s, and 10 ms each for communication.
    assert time.monotonic() - begun > 8 * 0.11
    lines = (tmp_path / "out" / "losses.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 8


@pytest.mark.parametrize("network", ["cosmoflow", "unet"])
def test_ranks_that_share_each_volume_have_the_losses_of_one(tmp_path: Path, network: str) -> None:
    small = ("--network", network, "--width", "16", "--filters", "4", "--samples", "8")
    small += ("--epochs", "2", "--out")
    run("train_volumes.py", *small, str(tmp_path / "one"))
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as ranks:
        words = (*small, str(tmp_path / "two"), "--group", "2")
        done = [ranks.submit(run, "train_volumes.py", *words, RANK=r, **group) for r in "01"]
        assert [one.exception() for one in done] == [None, None]
    one, two = check_run.losses(tmp_path / "one"), check_run.losses(tmp_path / "two")
    assert len(one) == 4
    assert two == pytest.approx(one, abs=1e-5)


def test_a_gan_continues_in_its_own_loop(tmp_path: Path) -> None:
    for epochs in ("1", "2"):
        run("train_gan.py", "--out", str(tmp_path), "--epochs", epochs)
    lines = (tmp_path / "losses.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 33))


def test_a_stream_gives_each_record_once_per_epoch(tmp_path: Path) -> None:
    run("train_stream.py", "--out", str(tmp_path), "--epochs", "2", "--workers", "1")
    lines = (tmp_path / "records-rank0.txt").read_text().splitlines()
    assert sorted(lines) == sorted(f"{e} {n}" for e in range(2) for n in range(1000))
    assert lines[:1000] != [line.replace("1 ", "0 ", 1) for line in lines[1000:]]


def test_steps_with_random_draws_continue(tmp_path: Path) -> None:
    small = ("--global-batch", "8", "--out")
    run("train_steps.py", "--steps", "4", *small, str(tmp_path / "whole"))
    for steps in ("2", "4"):
        # Another number of steps is another schedule, but not within the warm-up.
        run("train_steps.py", "--steps", steps, *small, str(tmp_path / "parts"))
    assert check_run.losses(tmp_path / "parts") == check_run.losses(tmp_path / "whole")
