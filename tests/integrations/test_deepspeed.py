"""A loop on DeepSpeed in changing worlds: batches, schedule and losses stay the same."""

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs requirements/integrations.txt")

from slurm_elastic.integrations.batch_share import share
from slurm_elastic.integrations.deepspeed import elastic_config
from tests.integrations import deepspeed_training
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
        lambda: deepspeed_training.main(words), log, ranks=ranks, micro_batches=4, **options
    )
    assert not any(codes), log.read_text()[-3000:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("deepspeed") / "undisturbed"
    attempt(out, ranks=1)
    return out


def assert_same_training(out: Path, undisturbed: Path) -> None:
    expected, actual = steps_of(undisturbed), steps_of(out)
    assert list(actual) == list(expected) == list(range(1, STEPS + 1))
    for step, line in actual.items():
        assert line["samples"] == expected[step]["samples"], step
        assert line["epoch"] == expected[step]["epoch"], step
        assert line["rate"] == pytest.approx(expected[step]["rate"], rel=1e-9), step
        assert line["loss"] == pytest.approx(expected[step]["loss"], abs=TOLERANCE), step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_that_changes_its_world_is_the_undisturbed_one(tmp_path, undisturbed, stage):
    """2 → 4 → 1 ranks, cut within an epoch each time; with ZeRO the checkpoint is converted."""
    out = tmp_path / "run"
    for ranks, stop in ((2, 7), (4, 16), (1, 0)):
        words = ["--stage", str(stage), "--save-every", "5", "--stop-at", str(stop)]
        attempt(out, *words, ranks=ranks)
    worlds = [line["world"] for line in steps_of(out).values()]
    assert worlds == [2] * 5 + [4] * 10 + [1] * 9
    assert_same_training(out, undisturbed)
    names = sorted(path.name for path in (out / "ckpt").iterdir() if path.is_dir())
    assert names == ["global_step20", "global_step24"]


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed):
    out, log = tmp_path / "run", tmp_path / "log"
    out.mkdir()
    esrun = FakeEsrun()
    esrun.order("run")
    words = ["--out", str(out), "--stage", "1", "--sleep", "0.05"]
    world = World(
        lambda: deepspeed_training.main(words), ranks=2, micro_batches=4, esrun=esrun, log=log
    )
    esrun.wait_for("step", 3)
    esrun.order("notice", 5)
    esrun.wait_for("checkpoint_step", 3)
    saved = max(r["checkpoint_step"] for r in esrun.reports if "checkpoint_step" in r)
    world.kill()
    assert list(steps_of(out)) == list(range(1, saved + 1)), "it trained on after its save"
    attempt(out, "--stage", "1", ranks=4)
    assert_same_training(out, undisturbed)


def test_elasticity_of_deepspeed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="elasticity: enabled is invalid"):
        elastic_config({"elasticity": {"enabled": True}}, share(8, per_rank=8, world=1), tmp_path)
