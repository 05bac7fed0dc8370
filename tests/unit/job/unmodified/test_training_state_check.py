"""What jumps over a change, as far as checkpoints show it, and what must not be taken for it."""

import argparse
import json
import math
import pickle
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.job.unmodified import training_state_check
from slurm_elastic.job.unmodified.resume_state import ResumeState
from slurm_elastic.job.unmodified.training_state_check import (
    TrainingPoint,
    TrainingStateCheck,
    find_jump,
    read_point,
)


def hugging_face(
    folder: Path,
    *,
    step: int,
    batch: int,
    samples: int = 1000,
    epochs: int = 100,
    rates: tuple[tuple[int, float], ...] = (),
) -> str:
    """Write trainer_state.json as transformers does for this global batch; return its folder."""
    per_epoch = math.ceil(samples / batch)
    path = folder / f"checkpoint-{step}"
    path.mkdir(exist_ok=True)
    state = {
        "global_step": step,
        "epoch": step / per_epoch,
        "max_steps": epochs * per_epoch,
        "num_train_epochs": epochs,
        "log_history": [{"step": s, "learning_rate": r, "loss": 1.0} for s, r in rates],
    }
    (path / "trainer_state.json").write_text(json.dumps(state))
    return str(path)


def attempt(state: ResumeState, world: int, *paths: str) -> str:
    check = TrainingStateCheck(state, world)
    check.begin_attempt()
    for path in paths:
        check.add(path)
    # As after a requeue: what is kept travels as JSON.
    state.training = json.loads(json.dumps(state.training))
    return state.jump


def test_a_batch_that_grows_with_the_world_is_a_jump(tmp_path: Path) -> None:
    state = ResumeState()
    assert attempt(state, 1, hugging_face(tmp_path, step=535, batch=125)) == ""
    jump = attempt(state, 4, hugging_face(tmp_path, step=545, batch=500))
    assert jump.startswith("1 → 4 ranks: epoch 66.9 at step 535, 272.5 at step 545")


def test_a_batch_that_shrinks_with_the_world_is_a_jump(tmp_path: Path) -> None:
    state = ResumeState()
    attempt(state, 4, hugging_face(tmp_path, step=100, batch=500))
    assert "4 → 1 ranks: epoch" in attempt(state, 1, hugging_face(tmp_path, step=110, batch=125))


@given(
    batch=st.integers(8, 300),
    samples=st.integers(300, 5000),
    before=st.integers(1, 5000),
    steps=st.integers(1, 500),
    rounding=st.integers(-1, 1),
)
def test_a_kept_batch_is_none(
    batch: int, samples: int, before: int, steps: int, rounding: int
) -> None:
    """The steps of an epoch are rounded: they may differ by one between two worlds."""
    per_epoch = math.ceil(samples / batch)
    other = max(1, per_epoch + rounding)

    def point(step: int, per: int) -> TrainingPoint:
        epoch = (step - 1) / per, (step + 1) / per
        return TrainingPoint(step=step, epoch=epoch, max_steps=100 * per, epochs=100.0)

    if per_epoch >= 20:  # with fewer, one step is more than 5 % of an epoch
        old, new = point(before, per_epoch), point(before + steps, other)
        if before <= 2 * per_epoch:  # later, the epoch is counted from the start anew
            assert find_jump(old, new) == ""
    assert find_jump(point(before, per_epoch), point(before + steps, per_epoch)) == ""


def test_in_the_same_world_only_the_step_is_compared(tmp_path: Path) -> None:
    state = ResumeState()
    attempt(state, 2, hugging_face(tmp_path, step=100, batch=100))
    assert attempt(state, 2, hugging_face(tmp_path, step=110, batch=200)) == ""
    jump = attempt(state, 2, hugging_face(tmp_path, step=10, batch=200))
    assert jump == "restarted on 2 ranks: step 110 is followed by step 10"
    alone = ResumeState()
    attempt(alone, 1, hugging_face(tmp_path, step=110, batch=200))
    jump = attempt(alone, 1, hugging_face(tmp_path, step=10, batch=200))
    assert jump == "restarted on 1 rank: step 110 is followed by step 10"


def test_a_batch_that_may_change_is_no_jump(tmp_path: Path) -> None:
    state = ResumeState()
    attempt(state, 1, hugging_face(tmp_path, step=535, batch=125))
    check = TrainingStateCheck(state, 4, batch_may_change=True)
    check.begin_attempt()
    check.add(hugging_face(tmp_path, step=545, batch=500))
    assert state.jump == ""
    check.begin_attempt()
    check.add(hugging_face(tmp_path, step=5, batch=500))
    assert state.jump.endswith("step 545 is followed by step 5")


def test_a_longer_training_is_no_jump_if_it_has_more_epochs() -> None:
    before = TrainingPoint(step=100, max_steps=1000, epochs=10.0)
    assert find_jump(before, TrainingPoint(step=110, max_steps=2000, epochs=20.0)) == ""
    jump = find_jump(before, TrainingPoint(step=110, max_steps=250, epochs=10.0))
    assert jump == "the whole training takes 250 steps instead of 1000 for 10 epochs"


def rates(*values: float) -> tuple[tuple[int, float], ...]:
    return tuple((10 * (at + 1), value) for at, value in enumerate(values))


@pytest.mark.parametrize(
    ("old", "new", "jumps"),
    [
        ((0.5, 1.0, 0.9, 0.8), (0.7, 0.6), False),  # warm-up, then a fall that goes on
        ((0.5, 1.0, 0.9, 0.8), (0.99, 0.98), True),  # the schedule begins anew
        ((0.5, 1.0, 0.9, 0.8), (0.1, 0.2, 0.3), True),  # its warm-up too
        ((1.0, 1.0, 1.0), (0.1, 0.1), False),  # a milestone
        ((0.1, 0.2, 0.3), (0.4, 0.5), False),  # the warm-up goes on
        ((1.0, 0.5, 1.0, 0.5), (1.0,), False),  # a cyclic schedule
        ((1.0, 0.5), (1.0,), False),  # too few to know
    ],
)
def test_learning_rates(old: tuple[float, ...], new: tuple[float, ...], jumps: bool) -> None:
    before = TrainingPoint(step=10 * len(old), rates=rates(*old))
    after = TrainingPoint(step=10 * len(old + new), rates=rates(*old, *new))
    assert bool(find_jump(before, after)) == jumps


@pytest.mark.parametrize(
    ("name", "step", "epoch"),
    [
        ("epoch=3-step=500.ckpt", 500, (3.0, 4.0)),
        ("checkpoint-500", 500, None),
        ("global_step500", 500, None),
        ("step_000500.pt", 500, None),
        ("ckpt.pt", None, None),
        ("snapshot_epoch3.pt", None, None),
        ("footstep", None, None),
        (f"step={'9' * 400}.pt", None, None),
    ],
)
def test_numbers_in_names(
    tmp_path: Path, name: str, step: int | None, epoch: tuple[float, float] | None
) -> None:
    point = read_point(str(tmp_path / name))
    assert (point and point.step) == step
    assert (point and point.epoch) == epoch


def test_lightning_that_runs_through_its_epochs_four_times_as_fast() -> None:
    def ckpt(epoch: int, step: int) -> TrainingPoint:
        point = read_point(f"/c/epoch={epoch}-step={step}.ckpt")
        assert point is not None
        return point

    assert find_jump(ckpt(9, 640), ckpt(10, 704)) == ""
    assert any(find_jump(ckpt(9, 640), ckpt(9 + n, 640 + 16 * n)) for n in range(1, 6))


def test_names_that_rotate_are_not_steps() -> None:
    state = ResumeState()
    attempt(state, 1, "/c/checkpoint_1.pt", "/c/checkpoint_2.pt", "/c/checkpoint_1.pt")
    attempt(state, 1, "/c/checkpoint_2.pt")
    assert attempt(state, 4, "/c/checkpoint_1.pt") == ""


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"global_step": "5"}',
        '{"global_step": -5}',
        '{"global_step": 5, "epoch": NaN, "max_steps": [], "log_history": {"a": 1}}',
        '{"global_step": 5, "log_history": [3, {"step": 1}, {"step": 1, "learning_rate": "x"}]}',
        "[" * 100_000,
    ],
)
def test_a_state_that_is_something_else_does_no_harm(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(text)
    point = read_point(str(folder))
    assert point is None or (point.step, point.epoch, point.rates) == (5, None, ())
    assert attempt(ResumeState(training={"step": "x"}), 2, str(folder)) == ""


def accelerate(folder: Path, name: str, rate: float) -> str:
    """Write the scheduler of a directory of accelerate's `save_state`."""
    path = folder / name
    path.mkdir(parents=True)
    with zipfile.ZipFile(path / "scheduler.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"_last_lr": [rate]}, protocol=2))
    return str(path)


@pytest.mark.parametrize(("name", "last"), [("step_{}0", "step 40"), ("epoch_{}", "step 4")])
@pytest.mark.parametrize(("rate", "jumps"), [(0.5, False), (0.85, True)])
def test_a_prepared_scheduler_of_accelerate_that_begins_again_jumps(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    name: str,
    last: str,
    rate: float,
    jumps: bool,
) -> None:
    state = ResumeState()
    before = [accelerate(tmp_path, name.format(i), 1 - i / 10) for i in (1, 2, 3)]
    assert attempt(state, 1, *before) == ""
    jump = attempt(state, 2, accelerate(tmp_path, name.format(4), rate))
    assert jump == (
        f"1 → 2 ranks: the learning rate had fallen to 0.7 and is 0.85 at {last}; accelerate steps"
        " a prepared scheduler once for each rank"
        if jumps
        else ""
    )
    remedy = "register the scheduler instead of preparing it (docs/integrations.md)"
    assert (remedy in capfd.readouterr().err) == jumps


def test_epochs_that_are_counted_anew_are_no_jump(tmp_path: Path) -> None:
    """A script that trains what is left of its epochs, and counts these from 0."""
    state = ResumeState()
    first = [accelerate(tmp_path / "a", f"epoch_{i}", 1 - i / 10) for i in range(4)]
    assert attempt(state, 1, *first) == ""
    second = [accelerate(tmp_path / "b", f"epoch_{i}", 0.6 - i / 10) for i in range(4)]
    assert attempt(state, 1, *second) == ""
    assert attempt(state, 2, accelerate(tmp_path / "c", "epoch_0", 0.2)) == ""


def of_one_file(folder: Path, name: str, **numbers: Any) -> str:
    """Write a checkpoint as torch.save does."""
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"model": {}, **numbers}, protocol=2))
    return str(folder / name)


def overwritten(folder: Path, state: ResumeState, world: int, *saves: dict[str, Any]) -> str:
    """Run an attempt that overwrites its one checkpoint; return what has jumped."""
    check = TrainingStateCheck(state, world)
    check.begin_attempt()
    for numbers in saves:
        check.add(of_one_file(folder, "checkpoint.pth", **numbers))
    state.training = json.loads(json.dumps(state.training))
    return state.jump


def by_iteration(epoch: int, steps: int) -> dict[str, Any]:
    """Return the checkpoint of torchvision's segmentation reference: its scheduler counts steps."""
    scheduler = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": [1 / (1 + steps)]}
    return {"epoch": epoch, "lr_scheduler": scheduler}


@pytest.mark.parametrize("factor", [2, 0.5])
def test_a_batch_that_changes_early_in_a_training_is_a_jump(tmp_path: Path, factor: float) -> None:
    """A job that has been rehearsed at its first checkpoint grows after its second or third."""
    new = int(100 * factor)
    later = [by_iteration(3, 300 + new), by_iteration(4, 300 + 2 * new)]
    for saves in (later[:1], later):
        state = ResumeState()
        assert overwritten(tmp_path, state, 1, by_iteration(0, 100)) == ""
        assert overwritten(tmp_path, state, 1, by_iteration(1, 200), by_iteration(2, 300)) == ""
        jump = overwritten(tmp_path, state, 2, *saves)
        # A single one may have been saved within an epoch.
        expected = f"1 → 2 ranks: an epoch had 100 steps and has {new} from step 300 on"
        assert jump == (expected if saves == later else "")


@given(
    per_epoch=st.integers(2, 2000),
    change=st.integers(-1, 1),
    epochs=st.integers(2, 30),
    saves=st.lists(st.floats(0.01, 0.99), max_size=4),
)
def test_a_kept_batch_is_none_wherever_a_script_saves(
    per_epoch: int, change: int, epochs: int, saves: list[float]
) -> None:
    """At the ends of epochs, and within some, as at a signal."""
    points: dict[str, TrainingPoint] = {}

    def save(epoch: int, step: int) -> str:
        points[str(step)] = TrainingPoint(step=step, epoch=(epoch, epoch + 1))
        return str(step)

    state, step = ResumeState(), epochs * per_epoch
    first = [save(i, (i + 1) * per_epoch) for i in range(epochs)]
    later = []
    for epoch, part in enumerate(saves, epochs):
        later.append(save(epoch, step + 1 + int(part * (per_epoch - 2))))
        step += per_epoch + change
        later.append(save(epoch, step))
    with patch.object(training_state_check, "read_point", points.get):
        assert attempt(state, 1, *first) == ""
        assert attempt(state, 2, *later) == ""


def test_iterations_that_begin_anew_are_a_jump(tmp_path: Path) -> None:
    state = ResumeState()
    overwritten(tmp_path, state, 1, {"iter_num": 500})
    jump = overwritten(tmp_path, state, 2, {"iter_num": 10})
    assert jump == "1 → 2 ranks: step 500 is followed by step 10"


def test_a_learning_rate_of_the_optimizer_that_rises_again_is_a_jump(tmp_path: Path) -> None:
    def saved(epoch: int, rate: float) -> dict[str, Any]:
        return {"epoch": epoch, "optimizer": {"state": {}, "param_groups": [{"lr": rate}]}}

    state = ResumeState()
    overwritten(tmp_path, state, 1, *(saved(i, 1 - i / 10) for i in range(4)))
    jump = overwritten(tmp_path, state, 2, saved(4, 0.85))
    assert jump == "1 → 2 ranks: the learning rate had fallen to 0.7 and is 0.85 at step 4"


def test_epochs_that_are_counted_anew_beside_steps_are_no_jump(tmp_path: Path) -> None:
    state = ResumeState()
    saves = [{"epoch": i, "global_step": 100 * (i + 1)} for i in range(5)]
    overwritten(tmp_path, state, 1, *saves)
    later = [{"epoch": i, "global_step": 500 + 100 * (i + 1)} for i in range(5)]
    assert overwritten(tmp_path, state, 2, *later) == ""


def by_epoch(epoch: int, steps: int) -> dict[str, Any]:
    """Return the checkpoint of timm and torchvision's classification: Adam counts the steps."""
    optimizer = {"state": {0: {"step": steps}}, "param_groups": [{"lr": 1 - epoch / 100}]}
    return {"epoch": epoch, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("steps", "jump"),
    [
        (50, "1 → 2 ranks: an epoch had 100 steps and has 50 from step 400 on"),
        (100, ""),
        (-100, ""),  # the optimizer is not loaded, and begins anew
    ],
)
@pytest.mark.parametrize("name", ["checkpoint.pth", "checkpoint-{}.pth.tar"])
def test_steps_that_the_optimizer_counts(tmp_path: Path, steps: int, jump: str, name: str) -> None:
    def saved(epoch: int, count: int) -> str:
        return of_one_file(tmp_path, name.format(epoch), **by_epoch(epoch, count))

    state = ResumeState()
    attempt_of = TrainingStateCheck(state, 1)
    attempt_of.begin_attempt()
    for epoch in range(4):
        attempt_of.add(saved(epoch, 100 * (epoch + 1)))
    attempt_of = TrainingStateCheck(state, 2)
    attempt_of.begin_attempt()
    for epoch in range(4, 9):
        count = -steps * (epoch - 3) if steps < 0 else 400 + steps * (epoch - 3)
        attempt_of.add(saved(epoch, count))
    assert state.jump == jump


def by_batches(epoch: int, batches: int) -> dict[str, Any]:
    """Return the checkpoint of torchvision's classification reference with SGD."""
    model = {"bn1.num_batches_tracked": torch.tensor(batches)}
    options = argparse.Namespace(batch_size=16, epochs=90, lr=0.1)
    return {"model": model, "epoch": epoch, "args": options}


@pytest.mark.parametrize(
    ("worlds", "micro_batches", "batches", "jump"),
    [
        ((1, 2), None, 50, "1 → 2 ranks: an epoch had 100 steps and has 50 from step 300 on"),
        ((4, 2), None, 200, ""),  # two batches for each step keep the batch
        ((4, 8), None, 50, "4 → 8 ranks: an epoch had 100 steps and has 50 from step 300 on"),
        ((1, 2), 8, 50, ""),
        ((4, 8), 4, 50, "4 → 8 ranks: an epoch had 100 steps and has 50 from step 300 on"),
        ((1, 2), None, 100, ""),
    ],
)
def test_batches_of_each_rank_that_batch_normalisation_counts(
    tmp_path: Path,
    worlds: tuple[int, int],
    micro_batches: int | None,
    batches: int,
    jump: str,
) -> None:
    state = ResumeState(start_world=worlds[0])
    saves = [(epoch, 100 * (epoch + 1)) for epoch in range(3)]
    later = [(epoch, 300 + batches * (epoch - 2)) for epoch in range(3, 6)]
    for world, points in zip(worlds, (saves, later), strict=True):
        check = TrainingStateCheck(state, world, micro_batches=micro_batches)
        check.begin_attempt()
        for epoch, count in points:
            torch.save(by_batches(epoch, count), tmp_path / "checkpoint.pth")
            check.add(str(tmp_path / "checkpoint.pth"))
    assert state.jump == jump


@pytest.mark.parametrize(
    ("ticks", "rates", "jump"),
    [
        (2, (1.0, 0.9), "the scheduler of the learning rate made 1.0 steps per step of the"),
        (1, (1.0, 0.9), ""),  # it is registered, and the script steps it itself
        (2, (1.0, 1.0), ""),  # after a warmup to a fixed rate it makes no difference
    ],
)
def test_a_prepared_scheduler_of_accelerate_that_runs_faster_is_a_jump(
    ticks: int, rates: tuple[float, float], jump: str
) -> None:
    """The rate falls as before, only faster: the script of transformers without the Trainer."""
    before = TrainingPoint(step=360, rates=((180, 0.5), (360, rates[0])), scheduled=360)
    after = TrainingPoint(step=420, rates=((420, rates[1]),), scheduled=360 + ticks * 60)
    found = find_jump(before, after)
    assert found == (f"{jump} optimizer, and 2.0 since step 360" if jump else "")
    assert not find_jump(before, after, only_steps=True)
    assert TrainingPoint.from_json(json.loads(json.dumps(after.to_json()))) == after
