"""A training through a sequence of layouts equals an uninterrupted one."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.core.layout import LayoutText
from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.parallel.fsdp import unsupported
from slurm_elastic.training.signals import STOPPED
from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, FakeLauncher, TrainingRuns

LAYOUTS = ["1x1", "2x2", "1x3", "3x1", "1x2x2", "4x1", "2-1", "1x1"]
DIRECTIVE = "1-8,parallel=hybrid"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TrainingRuns]:
    """Return the training on one rank without a change, one for each optimizer."""
    runs: dict[str, TrainingRuns] = {}

    def run(optimizer: str = "adamw") -> TrainingRuns:
        if optimizer not in runs:
            runs[optimizer] = TrainingRuns(tmp_path_factory.mktemp("plain"))
            runs[optimizer].run(1, optimizer=optimizer, model="tied", padding_kb=1)
        return runs[optimizer]

    return run


def run_attempt(
    runs: TrainingRuns,
    launcher: FakeLauncher,
    layout: str,
    *,
    until: int,
    notice: int,
    **options: Any,
) -> None:
    """Start in this layout; from step `until` on request a save, then end it as Slurm does."""
    size = LayoutText.parse(layout).world
    launcher.begin_attempt()
    launcher.order("run")
    launcher.set_orders(layout=layout)
    runs.start(size, launcher=launcher, step_s=0.1, directive=DIRECTIVE, **options)
    runs.wait_for_step(until)
    launcher.order("notice", notice=notice)
    launcher.wait_for("saved", notice=notice)
    runs.signal(signal.SIGTERM)
    assert runs.join() == [STOPPED] * size, runs.log()


def tensors(runs: TrainingRuns) -> dict[str, torch.Tensor]:
    """Return the tensors of the newest checkpoint."""
    found = CheckpointDirectory(runs.out / "ckpt", keep=2, log=pytest.fail).newest()
    assert found is not None
    assert found.step == STEPS
    return found.read()


def same(runs: TrainingRuns, plain: TrainingRuns) -> None:
    """Check that losses, samples and tensors equal those of the uninterrupted training."""
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))
    assert runs.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert runs.samples() == [Counter(range(SAMPLES))] * EPOCHS
    mine, theirs = tensors(runs), tensors(plain)
    names = {name for name in theirs if not name.startswith("blob.optim")}
    assert names == {name for name in mine if not name.startswith("blob.optim")}
    for name in names:
        value = theirs[name].double()
        off = (mine[name].double() - value).norm() / value.norm().clamp(min=1e-12)
        assert off <= 1e-5, (name, off)


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [
        ("adamw", {}),
        ("sgd", {"schedule": "gpipe", "micro_batch": 2, "workers": 1}),
        ("adamw", {"shard": True}),
    ],
)
def test_a_sequence_of_layouts_equals_an_uninterrupted_run(
    tmp_path: Path,
    launcher: FakeLauncher,
    undisturbed: Callable[..., TrainingRuns],
    optimizer: str,
    more: dict[str, Any],
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "model": "tied", "padding_kb": 1}
    plain = undisturbed(optimizer)
    runs = TrainingRuns(tmp_path / "moved")
    options |= more
    for number, layout in enumerate(LAYOUTS[:-1], start=1):
        until = max(runs.losses(), default=0) + 1
        run_attempt(runs, launcher, layout, until=until, notice=number, **options)
    launcher.order("run")
    launcher.set_orders(layout=LAYOUTS[-1])
    runs.start(1, launcher=launcher, directive=DIRECTIVE, **options)
    assert runs.join() == [0], runs.log()
    assert runs.layouts() == LAYOUTS
    same(runs, plain)


def test_a_layout_ordered_during_the_training_restarts_the_job_in_it(
    tmp_path: Path, launcher: FakeLauncher, undisturbed: Callable[..., TrainingRuns]
) -> None:
    options: dict[str, Any] = {"model": "tied", "padding_kb": 1}
    plain = undisturbed()
    runs = TrainingRuns(tmp_path / "moved")
    options |= {"launcher": launcher, "directive": DIRECTIVE}
    orders = ["2x1", "1x2", "1x2x2", "2x1"]
    launcher.set_orders(layout=orders[0])
    for ordered in orders[1:]:
        until = max(runs.losses(), default=0) + 2
        runs.start(2, step_s=0.1, **options)
        runs.wait_for_step(until)
        launcher.set_orders(layout=ordered)
        assert runs.join() == [RESTART_CODE] * 2, runs.log()
        assert runs.saved_steps()[-1] == max(runs.losses())
        assert "restarting in another layout" in runs.log()
    runs.start(2, **options)
    assert runs.join() == [0, 0], runs.log()
    assert runs.layouts() == orders
    same(runs, plain)


def test_a_job_goes_through_four_plans_by_order(
    tmp_path: Path, launcher: FakeLauncher, undisturbed: Callable[..., TrainingRuns]
) -> None:
    options: dict[str, Any] = {"model": "tied", "padding_kb": 1}
    plain = undisturbed()
    runs = TrainingRuns(tmp_path / "moved")
    options |= {"launcher": launcher, "directive": DIRECTIVE}
    plans = [
        "2x1+recompute",
        "2x1+shard=full+recompute",
        "1x2+recompute+accumulation=2",
        "2x1+shard=optimizer+accumulation=1",
    ]
    orders = [{"layout": plan.partition("+")[0], "plan": plan} for plan in plans]
    launcher.set_orders(**orders[0])
    micro_batches, writers, reported = [], [], []
    for following in [*orders[1:], None]:
        until = max(runs.losses(), default=0) + 2
        launcher.begin_attempt()
        runs.start(2, step_s=0.1 if following else 0.0, **options)
        runs.wait_for_step(until)
        report = launcher.wait_for("training")
        micro_batches.append(report["accumulation"])
        reported.append(report["plan"])
        if following:
            launcher.set_orders(**following)
            assert runs.join() == [RESTART_CODE] * 2, runs.log()
        else:
            assert runs.join() == [0, 0], runs.log()
        newest = runs.out / "ckpt" / (runs.out / "ckpt" / "latest").read_text().strip()
        writers.append(len(list(newest.glob("*.distcp"))))
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))
    assert runs.losses() == pytest.approx(plain.losses(), rel=1e-6)
    assert runs.layouts() == ["2x1", "1x2", "2x1"]
    assert reported == plans
    # Pipelines count the micro-batches in flight apart.
    assert micro_batches[-1] == 1
    # Replicas are written by one rank, parts by the ranks that hold them. An older torch cannot
    # divide parameters on CPUs; every rank holds the whole model there.
    assert writers == [1, 1 if unsupported() else 2, 2, 2]
    same(runs, plain)


def test_a_withdrawn_notice_does_not_change_a_pipeline(
    tmp_path: Path, launcher: FakeLauncher, undisturbed: Callable[..., TrainingRuns]
) -> None:
    plain = undisturbed()
    runs = TrainingRuns(tmp_path / "run")
    launcher.set_orders(layout="1x3")
    runs.start(3, launcher=launcher, directive=DIRECTIVE, step_s=0.1, model="tied", padding_kb=1)
    runs.wait_for_step(3)
    for notice in (1, 2):
        launcher.order("notice", notice=notice)
        saved = launcher.wait_for("saved", notice=notice)
        assert saved["checkpoint_step"] == saved["step"] == max(runs.losses())
        launcher.order("resume")
        launcher.wait_for("training", step=saved["step"] + 1)
    assert runs.join() == [0] * 3, runs.log()
    assert runs.layouts() == ["1x3"]
    same(runs, plain)


def test_a_layout_for_another_number_of_ranks_is_ignored(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    runs = TrainingRuns(tmp_path / "run")
    launcher.set_orders(layout="1x2")
    runs.start(2, launcher=launcher, directive=DIRECTIVE, step_s=0.1)
    runs.wait_for_step(3)
    launcher.set_orders(layout="2x2")
    assert runs.join() == [0, 0], runs.log()
    assert runs.layouts() == ["1x2"]
