"""A loop on accelerate in changing worlds: batches, schedule and losses stay the same."""

from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs requirements/integrations.txt")

from tests.integrations import accelerate_training
from tests.integrations.curves import steps_of
from tests.integrations.worlds import FakeEsrun, World, run

#: 192 samples, 4 epochs, 32 samples per step.
STEPS = 24
#: Sums of the same samples in another order, fp32; measured: below 1e-6.
TOLERANCE = 1e-5


def attempt(out: Path, *words: str, ranks: int, **options) -> None:
    out.mkdir(exist_ok=True)
    log = out.with_suffix(".log")
    words = ("--out", str(out), *words)
    codes = run(
        lambda: accelerate_training.main(words), log, ranks=ranks, micro_batches=4, **options
    )
    assert not any(codes), log.read_text()[-3000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("accelerate") / "undisturbed"
    attempt(out, ranks=1)
    return out


def assert_same_training(out: Path, undisturbed: Path, samples: int = 192) -> None:
    expected, actual = steps_of(undisturbed), steps_of(out)
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    for epoch in range(4):
        trained = [n for line in actual.values() if line["epoch"] == epoch for n in line["samples"]]
        assert len(trained) == len(set(trained)) == samples // 32 * 32, "each once in an epoch"
    for step, line in actual.items():
        assert line["samples"] == expected[step]["samples"], step
        assert line["epoch"] == expected[step]["epoch"], step
        assert line["rate"] == pytest.approx(expected[step]["rate"], rel=1e-9), step
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=TOLERANCE), step


def test_a_training_that_changes_its_world_is_the_undisturbed_one(tmp_path, undisturbed) -> None:
    """1 → 2 → 4 → 1 ranks, cut within an epoch each time; steps 6, 7 and 16 are trained twice."""
    out = tmp_path / "run"
    for ranks, stop in ((1, 7), (2, 10), (4, 16), (1, 0)):
        attempt(out, "--save-every", "5", "--stop-at", str(stop), ranks=ranks)
    worlds = [line["world"] for line in steps_of(out).values()]
    assert worlds == [1] * 5 + [2] * 5 + [4] * 5 + [1] * 9
    assert_same_training(out, undisturbed)
    assert len(list((out / "ckpt").iterdir())) == 2


def test_samples_that_do_not_fill_a_step_are_left_out_in_every_world(tmp_path, undisturbed) -> None:
    """209 samples: on one rank there would be 7 steps in an epoch, on four 6."""
    alone, out = tmp_path / "alone", tmp_path / "run"
    attempt(alone, "--samples", "209", ranks=1)
    for ranks, stop in ((4, 6), (1, 12), (2, 15), (4, 0)):  # twice at the end of an epoch
        words = ["--samples", "209", "--save-every", "3", "--stop-at", str(stop)]
        attempt(out, *words, ranks=ranks)
    assert_same_training(out, alone, samples=209)


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    out.mkdir()
    esrun = FakeEsrun()
    esrun.order("run")
    words = ["--out", str(out), "--sleep", "0.05"]
    world = World(
        lambda: accelerate_training.main(words), ranks=4, micro_batches=4, esrun=esrun, log=log
    )
    esrun.wait_for("step", 3)
    esrun.order("notice", 5)
    esrun.wait_for("checkpoint_step", 3)
    saved = max(r["checkpoint_step"] for r in esrun.reports if "checkpoint_step" in r)
    world.kill()
    assert list(steps_of(out)) == list(range(1, saved + 1)), "it trained on after its save"
    attempt(out, ranks=2)
    assert_same_training(out, undisturbed)


def test_an_unchanged_script_accumulates_what_esrun_was_told(tmp_path):
    from accelerate import Accelerator

    def check() -> None:
        assert Accelerator(cpu=True, gradient_accumulation_steps=1).gradient_accumulation_steps == 4

    log = tmp_path / "log"
    assert run(check, log, ranks=2, micro_batches=8) == [0, 0], log.read_text()


def test_the_share_takes_precedence_over_the_environment(tmp_path):
    from slurm_elastic.integrations.accelerate import elastic_accelerator, share

    def check() -> None:
        accelerator = elastic_accelerator(share(32, per_rank=8, world=1), cpu=True)
        assert accelerator.gradient_accumulation_steps == 4

    log = tmp_path / "log"
    assert run(check, log, ranks=1, micro_batches=7) == [0], log.read_text()


def test_settings_that_depend_on_the_ranks_are_refused() -> None:
    from slurm_elastic.integrations.accelerate import _check

    class Settings:
        use_seedable_sampler = False

    class Plain:
        step_scheduler_with_optimizer = True
        dataloader_config = Settings()

    with pytest.raises(ValueError, match="step_scheduler_with_optimizer: True is invalid"):
        _check(Plain())
    Plain.step_scheduler_with_optimizer = False
    with pytest.raises(ValueError, match="use_seedable_sampler: False is invalid"):
        _check(Plain())
