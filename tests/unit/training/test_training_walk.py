"""A training that walks over layouts, from checkpoint to checkpoint, equals one that does not."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.core.layout import LayoutText
from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.signals import STOPPED
from tests.support.training_runs import EPOCHS, SAMPLES, STEPS, Esrun, Worlds

WALK = ["1x1", "2x2", "1x3", "3x1", "1x2x2", "4x1", "2-1", "1x1"]
DIRECTIVE = "1-8,parallel=hybrid"


def leg(
    worlds: Worlds, esrun: Esrun, layout: str, *, until: int, notice: int, **options: Any
) -> None:
    """Start in this layout; from step `until` on ask for a save, then end it as Slurm would."""
    size = LayoutText.parse(layout).world
    esrun.forget()
    esrun.order("run")
    esrun.tell(layout=layout)
    worlds.start(size, esrun=esrun, step_s=0.1, directive=DIRECTIVE, **options)
    worlds.wait_for_step(until)
    esrun.order("notice", notice=notice)
    esrun.wait_for("saved", notice=notice)
    worlds.signal(signal.SIGTERM)
    assert worlds.join() == [STOPPED] * size, worlds.log()


def tensors(worlds: Worlds) -> dict[str, torch.Tensor]:
    """Of the newest checkpoint."""
    found = CheckpointDirectory(worlds.out / "ckpt", keep=2, say=pytest.fail).newest()
    assert found is not None
    assert found.step == STEPS
    return found.read()


def same(worlds: Worlds, plain: Worlds) -> None:
    """All that a training leaves is that of the uninterrupted one."""
    assert sorted(worlds.losses()) == list(range(1, STEPS + 1))
    assert worlds.losses() == pytest.approx(plain.losses(), rel=1e-5)
    assert worlds.samples() == [Counter(range(SAMPLES))] * EPOCHS
    mine, theirs = tensors(worlds), tensors(plain)
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
def test_a_walk_over_layouts_equals_an_uninterrupted_run(
    tmp_path: Path, esrun: Esrun, optimizer: str, more: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "model": "tied", "ballast": 1}
    plain = Worlds(tmp_path / "plain")
    plain.run(1, **options)
    worlds = Worlds(tmp_path / "moved")
    options |= more
    for number, layout in enumerate(WALK[:-1], start=1):
        until = max(worlds.losses(), default=0) + 1
        leg(worlds, esrun, layout, until=until, notice=number, **options)
    esrun.order("run")
    esrun.tell(layout=WALK[-1])
    worlds.start(1, esrun=esrun, directive=DIRECTIVE, **options)
    assert worlds.join() == [0], worlds.log()
    assert worlds.layouts() == WALK
    same(worlds, plain)


def test_a_layout_that_is_ordered_while_the_job_runs(tmp_path: Path, esrun: Esrun) -> None:
    options: dict[str, Any] = {"model": "tied", "ballast": 1}
    plain = Worlds(tmp_path / "plain")
    plain.run(1, **options)
    worlds = Worlds(tmp_path / "moved")
    options |= {"esrun": esrun, "directive": DIRECTIVE}
    orders = ["2x1", "1x2", "1x2x2", "2x1"]
    esrun.tell(layout=orders[0])
    for ordered in orders[1:]:
        until = max(worlds.losses(), default=0) + 2
        worlds.start(2, step_s=0.1, **options)
        worlds.wait_for_step(until)
        esrun.tell(layout=ordered)
        assert worlds.join() == [RESTART_CODE] * 2, worlds.log()
        assert worlds.saved_steps()[-1] == max(worlds.losses())
        assert "starting again in another layout" in worlds.log()
    worlds.start(2, **options)
    assert worlds.join() == [0, 0], worlds.log()
    assert worlds.layouts() == orders
    same(worlds, plain)


def test_a_notice_that_is_withdrawn_leaves_a_pipeline_as_it_was(
    tmp_path: Path, esrun: Esrun
) -> None:
    plain = Worlds(tmp_path / "plain")
    plain.run(1, model="tied", ballast=1)
    worlds = Worlds(tmp_path / "run")
    esrun.tell(layout="1x3")
    worlds.start(3, esrun=esrun, directive=DIRECTIVE, step_s=0.1, model="tied", ballast=1)
    worlds.wait_for_step(3)
    for notice in (1, 2):
        esrun.order("notice", notice=notice)
        saved = esrun.wait_for("saved", notice=notice)
        assert saved["checkpoint_step"] == saved["step"] == max(worlds.losses())
        esrun.order("resume")
        esrun.wait_for("training", step=saved["step"] + 1)
    assert worlds.join() == [0] * 3, worlds.log()
    assert worlds.layouts() == ["1x3"]
    same(worlds, plain)


def test_an_order_for_other_ranks_moves_nobody(tmp_path: Path, esrun: Esrun) -> None:
    worlds = Worlds(tmp_path / "run")
    esrun.tell(layout="1x2")
    worlds.start(2, esrun=esrun, directive=DIRECTIVE, step_s=0.1)
    worlds.wait_for_step(3)
    esrun.tell(layout="2x2")
    assert worlds.join() == [0, 0], worlds.log()
    assert worlds.layouts() == ["1x2"]
