"""Hugging Face's Trainer in changing worlds: batches, epochs, schedule and losses stay the same."""

import functools
import os
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="needs requirements/integrations.txt")

from slurm_elastic.integrations.transformers import keep_global_batch
from slurm_elastic.job.unmodified.resume_state import ResumeState
from slurm_elastic.job.unmodified.training_state_check import TrainingStateCheck
from tests.integrations import hf_training, training_attempts
from tests.integrations.recorded_steps import steps_of, worlds_of
from tests.integrations.training_attempts import STEPS, run_until_saved
from tests.integrations.worlds import FakeEsrun, World, run

attempt = functools.partial(training_attempts.attempt, hf_training)


def jump_of(out: Path, *attempts: tuple[int, tuple[int, ...]]) -> str:
    """Return the jump that esrun's check finds in the checkpoints of attempts: ranks, steps."""
    state = ResumeState()
    for ranks, steps in attempts:
        check = TrainingStateCheck(state, ranks)
        check.begin_attempt()
        for step in steps:
            check.add(str(out / "ckpt" / f"checkpoint-{step}"))
    return state.jump


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hf") / "undisturbed"
    attempt(out, "--accumulation", "4", "--plain", ranks=1, micro_batches=None)
    return out


def assert_same_training(out: Path, undisturbed: Path) -> None:
    training_attempts.assert_same_training(out, undisturbed)
    assert {line["max_steps"] for line in steps_of(out).values()} == {STEPS}


def test_a_training_that_changes_its_world_is_the_undisturbed_one(tmp_path, undisturbed) -> None:
    """1 → 2 → 4 → 1 ranks, cut within an epoch each time; 4 micro-batches of 8."""
    out = tmp_path / "run"
    for ranks, stop in ((1, 5), (2, 10), (4, 20), (1, 0)):
        attempt(out, "--stop-at", str(stop), ranks=ranks)
    assert worlds_of(out) == [1] * 5 + [2] * 5 + [4] * 10 + [1] * 4
    assert_same_training(out, undisturbed)
    assert not jump_of(out, (1, (5,)), (2, (10,)), (4, (15, 20)), (1, (24,)))


def test_the_start_world_is_kept_without_an_option(tmp_path, undisturbed) -> None:
    """Started on 2 ranks with accumulation 2; on 4 ranks it needs none."""
    out = tmp_path / "run"
    words = ["--accumulation", "2", "--stop-at"]
    attempt(out, *words, "10", ranks=2, micro_batches=None)
    attempt(out, *words, "0", ranks=4, start=2, micro_batches=None)
    assert_same_training(out, undisturbed)


def test_the_line_for_scripts_without_the_helper_keeps_the_batch(tmp_path, undisturbed) -> None:
    out, log = tmp_path / "run", tmp_path / "log"

    def script(stop: int) -> None:
        accumulation = os.environ.get("SLURM_ELASTIC_ACCUMULATION", "8")
        words = ["--plain", "--accumulation", accumulation, "--stop-at", str(stop)]
        hf_training.main(["--out", str(out), *words])

    for ranks, stop in ((1, 10), (4, 0)):
        codes = run(lambda stop=stop: script(stop), log, ranks=ranks, micro_batches=4)
        assert not any(codes), log.read_text()
    assert_same_training(out, undisturbed)


def test_batch_sizes_that_deepspeed_has_copied_are_not_changed(tmp_path) -> None:
    def script() -> None:
        args = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8, use_cpu=True, report_to=[]
        )
        args.deepspeed = {"zero_optimization": {"stage": 1}}
        assert keep_global_batch(args) is args
        keep_global_batch(args, 64)

    log = tmp_path / "log"
    assert run(script, log, ranks=1) == [1]
    assert "per_device_train_batch_size=8 and gradient_accumulation_steps=8" in log.read_text()


def test_samples_that_do_not_fill_a_step_change_neither_steps_nor_rates(tmp_path) -> None:
    alone, out = tmp_path / "alone", tmp_path / "run"
    attempt(alone, "--samples", "209", ranks=1)
    for ranks, stop in ((1, 10), (4, 15), (2, 0)):
        attempt(out, "--samples", "209", "--stop-at", str(stop), ranks=ranks)
    expected, actual = steps_of(alone), steps_of(out)
    assert list(actual) == list(expected) == list(range(1, 29))
    for step, line in actual.items():
        assert line["rate"] == pytest.approx(expected[step]["rate"], rel=1e-9), step
        assert line["samples"] == expected[step]["samples"] or step % 7 == 0, step
    assert not jump_of(out, (1, (5, 10)), (4, (15,)), (2, (20, 25, 28)))


def test_what_happens_without_it(tmp_path, undisturbed) -> None:
    """The plain script goes on with other batches and another schedule: the check finds it."""
    out = tmp_path / "run"
    words = ["--accumulation", "4", "--plain", "--stop-at"]
    attempt(out, *words, "10", ranks=1, micro_batches=None)
    attempt(out, *words, "0", ranks=2, micro_batches=None)
    assert list(steps_of(out)) != list(range(1, STEPS + 1))
    jump = jump_of(out, (1, (5, 10)), (2, (12,)))
    assert jump == "1 → 2 ranks: epoch 1.7 at step 10, 4.0 at step 12: expected 2.0"


def test_the_callback_alone_refuses_a_schedule_that_jumps(tmp_path, undisturbed) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    words = ["--out", str(out), "--callback-only", "--accumulation", "4"]
    assert run(lambda: hf_training.main([*words, "--stop-at", "10"]), log, ranks=1) == [0]
    log.unlink()
    codes = run(lambda: hf_training.main(words), log, ranks=2)
    assert any(codes)
    lines = [line for line in log.read_text().splitlines() if "slurm-elastic:" in line]
    assert lines
    assert all(
        "the checkpoint of step 10 is of epoch 1.67, which is epoch 3.33 with a global batch for 2"
        " ranks: the schedule would jump; use keep_global_batch(args)" in line
        for line in lines
    )
    assert "Traceback" not in log.read_text()


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed) -> None:
    out = tmp_path / "run"
    report = run_until_saved(hf_training, out, "--save-every", "1000", ranks=2).state.report()
    assert (report.kind, report.global_batch, report.micro_batch) == ("script", 32, 8)
    assert report.accumulation == 1
    assert report.step_time_s >= 0.05
    attempt(out, "--save-every", "1000", ranks=4)
    assert_same_training(out, undisturbed)


def test_a_notice_that_is_withdrawn_lets_it_go_on(tmp_path, undisturbed) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    esrun = FakeEsrun()
    esrun.order("run")
    words = ["--out", str(out), "--save-every", "1000", "--sleep", "0.02"]
    world = World(lambda: hf_training.main(words), ranks=2, micro_batches=4, esrun=esrun, log=log)
    esrun.wait_for("step", 2)
    esrun.order("notice", 5)
    esrun.wait_for("checkpoint_step", 2)
    esrun.order("resume")
    assert world.wait() == [0, 0]
    assert len(list((out / "ckpt").glob("checkpoint-*"))) == 2, "one for the notice, one at the end"
    assert_same_training(out, undisturbed)
