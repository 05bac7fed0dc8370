"""Attempts of a recorded training in worlds of any size, compared with an undisturbed one."""

from pathlib import Path
from types import ModuleType
from typing import Any

from tests.integrations.recorded_steps import assert_same_steps, steps_of
from tests.integrations.worlds import FakeEsrun, World, run

#: 192 samples, 4 epochs, 32 samples per step.
STEPS = 24
#: Four of eight samples make a step.
MICRO_BATCHES = 4
#: Sums of the same samples in another order, fp32; measured: below 1e-6.
TOLERANCE = 1e-5


def attempt(
    script: ModuleType,
    out: Path,
    *words: str,
    ranks: int,
    micro_batches: int | None = MICRO_BATCHES,
    **options: Any,
) -> None:
    """Run one attempt of a training script to its end; fail with its log if a rank fails.

    Args:
        script: a training of tests.integrations.
        out: folder of the training, the same for all its attempts.
        words: further options of the script.
        ranks: of this attempt.
        micro_batches: of `esrun --micro-batches`; None without.
        options: further ones of `worlds.World`.
    """
    log = out.with_suffix(".log")
    command = ("--out", str(out), *words)
    codes = run(
        lambda: script.main(command), log, ranks=ranks, micro_batches=micro_batches, **options
    )
    assert not any(codes), log.read_text()[-3000:]


def run_until_saved(script: ModuleType, out: Path, *words: str, ranks: int) -> FakeEsrun:
    """Run a training until it has answered a notice by a save, then end it as a requeue does.

    Returns:
        The fake esrun, with the reports.
    """
    esrun = FakeEsrun()
    esrun.order("run")
    command = ("--out", str(out), "--sleep", "0.05", *words)
    world = World(
        lambda: script.main(command),
        ranks=ranks,
        micro_batches=MICRO_BATCHES,
        esrun=esrun,
        log=out.with_suffix(".log"),
    )
    esrun.wait_for("step", 4)
    esrun.order("notice", 5)
    esrun.wait_for("checkpoint_step", 4)
    saved = max(r["checkpoint_step"] for r in esrun.reports if "checkpoint_step" in r)
    world.kill()
    assert list(steps_of(out)) == list(range(1, saved + 1)), "it trained on after its save"
    return esrun


def assert_same_training(out: Path, undisturbed: Path) -> None:
    """Check that a training has done the steps of an undisturbed one."""
    assert_same_steps(steps_of(out), steps_of(undisturbed), steps=STEPS, tolerance=TOLERANCE)
