"""A loop on accelerate in changing worlds: batches, schedule and losses stay the same."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="needs requirements/integrations.txt")

from tests.integrations import accelerate_training, training_attempts
from tests.integrations.recorded_steps import steps_of, worlds_of
from tests.integrations.training_attempts import assert_same_training, run_until_saved
from tests.integrations.worlds import run

attempt = functools.partial(training_attempts.attempt, accelerate_training)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("accelerate") / "undisturbed"
    attempt(out, ranks=1)
    assert_each_sample_once(out, samples=192)
    return out


def assert_each_sample_once(out: Path, samples: int) -> None:
    """Check that each epoch has no sample twice, and all but those that do not fill a step."""
    for epoch in range(4):
        trained = [
            number
            for line in steps_of(out).values()
            if line["epoch"] == epoch
            for number in line["samples"]
        ]
        assert len(trained) == len(set(trained)) == samples // 32 * 32


def test_a_training_that_changes_its_world_is_the_undisturbed_one(tmp_path, undisturbed) -> None:
    """1 → 2 → 4 → 1 ranks, cut within an epoch each time; steps 6, 7 and 16 are trained twice."""
    out = tmp_path / "run"
    for ranks, stop in ((1, 7), (2, 10), (4, 16), (1, 0)):
        attempt(out, "--save-every", "5", "--stop-at", str(stop), ranks=ranks)
    assert worlds_of(out) == [1] * 5 + [2] * 5 + [4] * 5 + [1] * 9
    assert_same_training(out, undisturbed)
    assert len(list((out / "ckpt").iterdir())) == 2


def test_samples_that_do_not_fill_a_step_are_left_out_in_every_world(tmp_path, undisturbed) -> None:
    """209 samples: on one rank there would be 7 steps in an epoch, on four 6."""
    alone, out = tmp_path / "alone", tmp_path / "run"
    attempt(alone, "--samples", "209", ranks=1)
    for ranks, stop in ((4, 6), (1, 12), (2, 15), (4, 0)):  # twice at the end of an epoch
        words = ["--samples", "209", "--save-every", "3", "--stop-at", str(stop)]
        attempt(out, *words, ranks=ranks)
    assert_each_sample_once(alone, samples=209)
    assert_same_training(out, alone)


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed) -> None:
    out = tmp_path / "run"
    run_until_saved(accelerate_training, out, ranks=4)
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
