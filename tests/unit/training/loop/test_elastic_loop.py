"""Trainings whose loop belongs to the script: equal over any change of the number of ranks."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.core.report import Report
from slurm_elastic.training.signals import STOPPED
from tests.support.trainings.forked_scripts import run_forked
from tests.support.trainings.loop_runs import LoopRuns
from tests.support.trainings.training_runs import BATCH, EPOCHS, SAMPLES, STEPS, FakeLauncher

_MADE = "loop = ElasticLoop('c', global_batch=8, model=model)"
ONCE = [Counter(range(SAMPLES))] * EPOCHS


@pytest.fixture
def loop_runs(tmp_path: Path) -> Iterator[LoopRuns]:
    started = LoopRuns(tmp_path / "run")
    yield started
    started.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoopRuns]:
    """Return complete runs of one rank, one for the same options."""
    runs: dict[str, LoopRuns] = {}

    def run(**options: Any) -> LoopRuns:
        name = str({"script": "dataset"} | options)
        if name not in runs:
            runs[name] = LoopRuns(tmp_path_factory.mktemp("plain"))
            runs[name].run(1, **options)
        return runs[name]

    return run


def interrupted(runs: LoopRuns, *sizes: int, **options: Any) -> None:
    """Run on the given numbers of ranks in turn, each stopped by SIGTERM but the last."""
    for number, size in enumerate(sizes[:-1], start=1):
        at = number * STEPS // len(sizes)
        runs.start(size, step_s=0.02, signal_at=at, signal=signal.SIGTERM, **options)
        assert runs.join() == [STOPPED] * size, runs.log()
    runs.run(sizes[-1], **options)


@pytest.mark.parametrize(
    "options",
    [
        {"script": "dataset"},
        {"script": "dataset", "workers": 2, "background": True, "every_s": 0.2},
        {"script": "dataset", "micro_batch": 5},
        {"script": "dataset", "stream": True},
        {"script": "dataset", "stream": True, "workers": 2},
        {"script": "steps"},
    ],
    ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()),
)
def test_a_run_that_changes_its_size_equals_an_undisturbed_one(
    loop_runs: LoopRuns, undisturbed: Callable[..., LoopRuns], options: dict[str, Any]
) -> None:
    """Two optimizers, dropout, random augmentation, dictionaries as samples."""
    plain = undisturbed(**options)
    interrupted(loop_runs, 1, 3, 2, **options)
    assert loop_runs.sizes() == [1, 3, 2]
    assert sorted(loop_runs.losses()) == list(range(1, STEPS + 1))
    assert loop_runs.losses() == pytest.approx(plain.losses(), abs=1e-6)
    assert loop_runs.samples() == plain.samples()
    if options["script"] == "dataset":
        assert loop_runs.samples() == ONCE


def test_a_schedule_per_epoch_is_stepped_once_per_epoch(loop_runs: LoopRuns) -> None:
    # Step 6 is the last of an epoch: the script's code after the epoch follows it.
    for at in (6, 12):
        loop_runs.start(2, step_s=0.02, signal_at=at, signal=signal.SIGTERM)
        assert loop_runs.join() == [STOPPED] * 2, loop_runs.log()
    loop_runs.run(1)
    rates = json.loads((loop_runs.out / "rates.json").read_text())
    assert rates == pytest.approx([0.01, 0.007, 0.0049])
    assert loop_runs.samples() == ONCE


def test_a_killed_run_repeats_only_the_steps_since_its_checkpoint(
    loop_runs: LoopRuns, undisturbed: Callable[..., LoopRuns]
) -> None:
    plain = undisturbed()
    loop_runs.start(2, step_s=0.05, every_s=0)
    loop_runs.wait_for_step(8)
    loop_runs.kill()
    done, saved = max(loop_runs.losses()), max(loop_runs.saved_steps())
    assert saved in (done - 1, done)
    loop_runs.run(3)
    assert loop_runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_notice_is_answered_and_a_withdrawn_one_changes_nothing(
    loop_runs: LoopRuns, launcher: FakeLauncher, undisturbed: Callable[..., LoopRuns]
) -> None:
    plain = undisturbed()
    loop_runs.start(2, launcher=launcher, step_s=0.05)
    loop_runs.wait_for_step(3)
    launcher.order("notice", notice=1)
    saved = launcher.wait_for("saved", notice=1)
    assert saved["checkpoint_step"] == saved["step"] == max(loop_runs.losses())
    launcher.order("resume")
    assert loop_runs.join() == [0, 0], loop_runs.log()
    assert loop_runs.losses() == pytest.approx(plain.losses(), abs=1e-6)
    reports = [Report.from_wire({"job_id": 1, "run": 0} | r) for r in launcher.reports]
    assert reports[0].phase == "starting"
    last = reports[-1]
    assert (last.phase, last.step, last.progress, last.exit_code) == ("ended", STEPS, 1.0, 0)
    assert {(r.kind, r.gpus, r.global_batch, r.layout) for r in reports} == {
        ("library", 2, BATCH, "2x1")
    }
    assert any(r.step_time_s and r.step_time_s >= 0.04 for r in reports)
    assert any(r.proven for r in reports)


def test_a_rehearsal_is_answered_by_a_proven_checkpoint(
    loop_runs: LoopRuns, launcher: FakeLauncher
) -> None:
    launcher.order("rehearse")
    loop_runs.start(2, launcher=launcher, step_s=0.05)
    assert launcher.wait_for("training", proven=True)["checkpoint_step"] < STEPS


def test_a_loop_left_by_break_is_saved_by_finish(loop_runs: LoopRuns) -> None:
    loop_runs.run(2, script="steps", break_at=7)
    assert loop_runs.saved_steps() == [7]
    loop_runs.run(1, script="steps")
    assert sorted(loop_runs.losses()) == list(range(1, STEPS + 1))
    assert len((loop_runs.out / "losses.jsonl").read_text().splitlines()) == STEPS


def test_a_finished_run_does_nothing_more(loop_runs: LoopRuns) -> None:
    loop_runs.run(1, epochs=2)
    before = (loop_runs.out / "losses.jsonl").read_text()
    loop_runs.run(2, epochs=2)
    assert (loop_runs.out / "losses.jsonl").read_text() == before
    loop_runs.run(2)  # three epochs
    assert loop_runs.samples() == ONCE


def test_the_last_smaller_batch_can_be_left_out(loop_runs: LoopRuns) -> None:
    interrupted(loop_runs, 2, 3, drop_last=True)
    full = SAMPLES // BATCH * BATCH
    assert [sum(c.values()) for c in loop_runs.samples()] == [full] * EPOCHS
    assert all(set(c.values()) == {1} for c in loop_runs.samples())


def test_parts_of_parameters_are_saved_by_each_rank(
    loop_runs: LoopRuns, undisturbed: Callable[..., LoopRuns]
) -> None:
    if torch.__version__.startswith("2.6"):
        pytest.skip("fully_shard does not run on CPU with torch 2.6")
    plain = undisturbed()
    loop_runs.start(2, fully_shard=True, step_s=0.02, signal_at=6, signal=signal.SIGTERM)
    assert loop_runs.join() == [STOPPED] * 2, loop_runs.log()
    newest = loop_runs.out / "ckpt" / f"step_{max(loop_runs.saved_steps()):08d}"
    files = {p.name for p in newest.glob("*.distcp")}
    assert files == {"__0_0.distcp", "__1_0.distcp"}
    loop_runs.start(3, fully_shard=True, step_s=0.02, signal_at=12, signal=signal.SIGTERM)
    assert loop_runs.join() == [STOPPED] * 3, loop_runs.log()
    loop_runs.run(1)  # whole parameters
    assert loop_runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_options_beside_those_of_a_loader_count() -> None:
    output = script(
        """
        loop = ElasticLoop("c", global_batch=4, model=model)
        made = torch.utils.data.DataLoader(list(range(10)), batch_size=5, shuffle=True)
        loader = loop.loader(made, drop_last=True)
        for epoch in loop.epochs(1):
            print(sum(len(batch) for batch in loader), len(loader))
        """
    )
    assert output.stdout == "8 2\n"


def test_passes_without_effect_are_logged(loop_runs: LoopRuns) -> None:
    loop_runs.run(4, script="steps", steps=2)
    assert "4 ranks share 6 micro-batches unequally: 2 of 8 passes" in loop_runs.log()


def test_parts_that_are_made_after_the_loop_are_refused(loop_runs: LoopRuns) -> None:
    if torch.__version__.startswith("2.6"):
        pytest.skip("fully_shard does not run on CPU with torch 2.6")
    late = {"shard_late": True, "unwrapped": True}
    loop_runs.start(2, script="steps", environment={"SLURM_ELASTIC_TRACEBACK": "1"}, **late)
    assert 0 not in loop_runs.join()
    assert "model: fully_shard after the loop was made is invalid" in loop_runs.log()


def test_ranks_that_train_alone_end_with_one_line(loop_runs: LoopRuns) -> None:
    loop_runs.start(2, unwrapped=True, environment={"SLURM_ELASTIC_TRACEBACK": "1"})
    assert 0 not in loop_runs.join()
    assert "model: the weights of the ranks are not equal" in loop_runs.log()


def test_a_sigterm_at_any_moment_loses_and_repeats_nothing(loop_runs: LoopRuns) -> None:
    for size in (2, 1, 3):
        loop_runs.start(size, step_s=0.02, workers=1)
        loop_runs.wait_for_step(max(loop_runs.losses(), default=0) + 2)
        loop_runs.signal(signal.SIGTERM)
        assert loop_runs.join() == [STOPPED] * size, loop_runs.log()
    loop_runs.run(2)
    assert loop_runs.samples() == ONCE


def test_unequal_shares_have_no_accumulation_but_a_weight() -> None:
    output = script(
        """
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
        loop = ElasticLoop("ckpt", global_batch=10, micro_batch=4, model=model)
        print(loop.accumulation)
        for step in loop.steps(1):
            print([(n, loop.loss_weight, loop.last_micro_batch) for n in loop.micro_batches()])
        """
    )
    assert output.stdout.splitlines() == ["3", "[(0, 0.4, False), (1, 0.4, False), (2, 0.2, True)]"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ElasticLoop('c', global_batch=8)", "no objects is invalid"),
        ("ElasticLoop('c', global_batch=0, model=model)", "global_batch: 0 is invalid"),
        ("ElasticLoop('c', global_batch=8, micro_batch=9, model=model)", "micro_batch: 9"),
        ("ElasticLoop('c', global_batch=8, model=model, best=1e9)", "best: float is invalid"),
        ("ElasticLoop('c', global_bach=8, model=model)", "global_batch"),
        ("ElasticLoop('c', global_batch=8, model=model).loss_weight", "loop.loss_weight: no"),
        (
            "ElasticLoop('c', global_batch=8, model=model).loader([0], batch_size=4)",
            "loop.loader: batch_size is invalid",
        ),
        (
            "ElasticLoop('c', global_batch=8, model=model).loader(iter([0]))",
            "dataset: list_iterator is invalid",
        ),
        (
            "MADE; loop.loader([0]); next(loop.steps(3))",
            "loop.steps: a loop with loop.loader is invalid",
        ),
        (
            "MADE; loop.loader([0]); loop.loader([0])",
            "loop.loader: a second one is invalid",
        ),
    ],
)
def test_misuse_is_one_line(line: str, message: str) -> None:
    done = script(line, check=False)
    if "global_bach" in line:
        assert "TypeError" in done.stderr
        return
    assert done.returncode == 1
    (only,) = done.stderr.splitlines()
    assert only.startswith("slurm-elastic: ")
    assert message in only


@pytest.mark.parametrize(
    ("directive", "message"),
    [
        ("1-4,parallel=pipeline", "directive: parallel=pipeline is invalid"),
        ("1-4,freeze=auto", "directive: freeze=auto is invalid"),
        ("1-4,batch=64-256", "directive: batch=64-256 is invalid"),
    ],
)
def test_a_directive_for_init_is_one_line(directive: str, message: str) -> None:
    done = script("ElasticLoop('c', global_batch=8, model=model)", check=False, directive=directive)
    (only,) = done.stderr.splitlines()
    assert message in only


def test_a_range_of_batches_stays_without_effect() -> None:
    line = "loop = ElasticLoop('c', global_batch=8, model=model)"
    assert "the batch stays 8" in script(line, directive="1-4,batch=4-16").stderr


def test_a_loop_that_is_left_without_an_end_is_logged() -> None:
    lines = """
        loop = ElasticLoop("c", global_batch=8, model=model)
        for step in loop.steps(3):
            if step == 1:
                {}
        """
    for forked in (False, True):
        assert "without loop.finish()" in script(lines.format("break"), forked=forked).stderr
    assert "without loop.finish()" not in script(lines.format("1 / 0"), check=False).stderr
    assert "without" not in script(lines.format("break") + "\n        loop.finish()").stderr


def test_torchrun_starts_the_ranks(tmp_path: Path) -> None:
    """The store is then served by torchrun, not by rank 0."""
    place = tmp_path / "script.py"
    place.write_text(
        "from slurm_elastic.training import ElasticLoop\nimport torch\n"
        "model = torch.nn.Linear(3, 2)\n"
        "torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)\n"
        "loop = ElasticLoop('c', global_batch=8, model=model)\n"
        "assert [*loop.steps(3)] == [0, 1, 2] and loop.world_size == 2\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(place)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if "use_libuv was requested" in done.stderr:
        pytest.skip("Debian's torchrun does not start")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c" / "step_00000003").is_dir()


def test_another_model_dataset_or_seed_is_refused_in_one_line(tmp_path: Path) -> None:
    first = """
        loop = ElasticLoop({0!r}, global_batch=4, {1})
        loader = loop.loader({2})
        for epoch in loop.epochs(1):
            for batch in loader:
                pass
        """
    place = str(tmp_path / "ckpt")
    objects, data = "model=model", "list(range(8))"
    script(first.format(place, objects, data))
    for changed, message in (
        ((objects, "list(range(9))"), "dataset: {'samples': 9"),
        (("model=model, seed=1", data), "loop_seed 0 is invalid"),
        (("model=torch.nn.Linear(5, 2)", data), "model.weight is 2x3 in the checkpoint"),
        (("model=torch.nn.Linear(3, 2, bias=False)", data), "only the checkpoint has model.bias"),
        (("model=model, ema=model", data), "the checkpoint has no ema"),
        (("ema=model", data), "the checkpoint has no ema"),
    ):
        done = script(first.format(place, *changed), check=False)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1], done.stderr
        assert "Traceback" not in done.stderr


def test_an_exception_ends_a_script_with_data_loader_workers() -> None:
    done = script(
        """
        loop = ElasticLoop("c", global_batch=4, model=model)
        for batch in loop.loader(list(range(64)), num_workers=2):
            raise ValueError("a mistake of the script")
        """,
        check=False,
        forked=False,
    )
    assert done.returncode == 1
    assert "a mistake of the script" in done.stderr


def script(
    lines: str, *, check: bool = True, directive: str = "", forked: bool = True
) -> "subprocess.CompletedProcess[str]":
    """Run lines of a script in a folder of its own; not forked where Python's end matters."""
    text = "from slurm_elastic.training import ElasticLoop\nimport os, torch\n"
    text += "model = torch.nn.Linear(3, 2)\n" + textwrap.dedent(lines).replace("MADE", _MADE)
    env = os.environ | {"OMP_NUM_THREADS": "1", "SLURM_ELASTIC": directive}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        if forked:
            done = run_forked(text, cwd=Path(folder), env=env, timeout=60)
        else:
            done = subprocess.run(
                [sys.executable, "-c", text],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
                cwd=folder,
                env=env,
            )
    assert not check or done.returncode == 0, done.stderr
    return done
