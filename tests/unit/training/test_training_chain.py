"""A training that changes its world equals one that does not."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.training.signals import STOPPED
from tests.support.training_runs import EPOCHS, SAMPLES, STEPS, Esrun, Worlds


def move(worlds: Worlds, esrun: Esrun, *, size: int, until: int, notice: int, **options) -> None:
    """Run with `size` ranks; from step `until` on ask for a save, then end it as Slurm would."""
    esrun.forget()
    esrun.order("run")
    worlds.start(size, esrun=esrun, step_s=0.01, **options)
    worlds.wait_for_step(until)
    esrun.order("notice", notice=notice)
    esrun.wait_for("saved", notice=notice)
    worlds.signal(signal.SIGTERM)
    assert worlds.join() == [STOPPED] * size, worlds.log()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("adamw", {"micro_batch": 3}), ("sgd", {"workers": 1})],
)
def test_a_chain_of_worlds_equals_an_uninterrupted_run(
    tmp_path: Path, esrun: Esrun, optimizer: str, options: dict
) -> None:
    plain = Worlds(tmp_path / "plain")
    plain.run(1, optimizer=optimizer)
    moved = Worlds(tmp_path / "moved")
    for notice, (size, until) in enumerate([(1, 2), (2, 5), (4, 8), (3, 12)], start=1):
        move(moved, esrun, size=size, until=until, notice=notice, optimizer=optimizer, **options)
    moved.run(1, optimizer=optimizer, **options)
    assert moved.sizes() == [1, 2, 4, 3, 1]
    assert moved.samples() == [Counter(range(SAMPLES))] * EPOCHS
    assert sorted(moved.losses()) == list(range(1, STEPS + 1))
    assert moved.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_new_start_after_the_end_does_nothing(worlds: Worlds) -> None:
    worlds.run(1)
    before = (worlds.out / "losses.jsonl").read_text()
    worlds.run(2)
    assert (worlds.out / "losses.jsonl").read_text() == before
    assert worlds.saved_steps() == [STEPS]


def test_dropout_goes_on_as_if_nothing_had_happened(tmp_path: Path, esrun: Esrun) -> None:
    plain = Worlds(tmp_path / "plain")
    plain.run(2, dropout=0.5)
    moved = Worlds(tmp_path / "moved")
    move(moved, esrun, size=2, until=7, notice=1, dropout=0.5)
    moved.run(2, dropout=0.5)
    assert moved.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_kill_costs_the_steps_since_the_last_checkpoint(worlds: Worlds) -> None:
    worlds.start(2, step_s=0.05, every_s=0.2)
    worlds.wait_for_step(11)
    worlds.kill()
    kept = max(worlds.saved_steps())
    assert kept > 0
    worlds.run(3)
    assert f"went on from step {kept} with 3 rank(s)" in worlds.log()
    assert sorted(worlds.losses()) == list(range(1, STEPS + 1))
