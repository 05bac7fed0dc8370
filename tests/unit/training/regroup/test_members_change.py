"""Ranks join and leave a training while it runs."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, FakeLauncher, TrainingRuns


def begin(runs: TrainingRuns, launcher: FakeLauncher, size: int, **options: object) -> int:
    """Start a training that companions can join; return the port for them."""
    launcher.set_companions({})
    launcher.first_message_after_s = 1.0  # after the first step
    runs.start(size, launcher=launcher, **options)
    return int(launcher.wait_for_group(can=True)["port"])


@pytest.mark.parametrize(
    ("sizes", "optimizer", "options"),
    [
        ([1, 3], "adamw", {"micro_batch": 3}),
        ([2, 4, 2], "sgd", {"workers": 1}),
        ([1, 3, 1], "adamw", {}),
    ],
)
def test_a_training_whose_ranks_change_equals_an_undisturbed_one(
    tmp_path: Path,
    launcher: FakeLauncher,
    runs: TrainingRuns,
    sizes: list[int],
    optimizer: str,
    options: dict,
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1, optimizer=optimizer)
    options |= {"optimizer": optimizer, "step_s": 0.15}
    port = begin(runs, launcher, sizes[0], **options)
    runs.start_companion(4711, 2, port=port, **options)
    launcher.set_companions({"4711": 2})
    joined = launcher.wait_for_group(generation=1)
    assert joined["companions"] == {"4711": 2}
    assert not joined["lost"]
    if len(sizes) == 3:
        runs.wait_for_step(joined["step"] + 2)
        launcher.set_companions({})
        left = launcher.wait_for_group(generation=2)
        assert left["companions"] == {}
        assert not left["lost"]
    runs.hurry()
    assert runs.join() == [0] * (sizes[0] + 2), runs.log()
    assert runs.sizes() == sizes
    assert runs.samples() == [Counter(range(SAMPLES))] * EPOCHS
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)
