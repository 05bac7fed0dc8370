"""Trainings of `init` that exchange gradients in buckets, while their ranks come and go."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.trainings.member_faults import MemberFault
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns

EPOCHS, STEPS = 6, 36


def test_buckets_follow_ranks_that_join_and_that_are_lost_in_a_step(
    tmp_path: Path, launcher: FakeLauncher, runs: TrainingRuns
) -> None:
    options = {"epochs": EPOCHS, "model": "tied", "clip_norm": 0.5, "step_s": 0.04}
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1, **options)
    options |= {"overlap": "buckets", "micro_batch": 3}
    launcher.set_companions({})
    runs.start(2, launcher=launcher, faults=[SmallBuckets()], **options)
    port = int(launcher.wait_for_group(can=True)["port"])
    runs.wait_for_step(6)
    fault = MemberFault(rank=47110, step=STEPS - 8)
    runs.start_companion(4711, 1, port=port, faults=[SmallBuckets(), fault], **options)
    launcher.set_companions({"4711": 1})
    assert launcher.wait_for_group(generation=2)["lost"], runs.log()
    assert runs.join() == [0, 0, -9], runs.log()
    assert runs.sizes() == [2, 3, 2]
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)
    reported = [r for r in launcher.reports if r.get("exchange", "").startswith("buckets")]
    assert {r["gpus"] for r in reported} == {2, 3}
    assert all(r["exposed"] >= 0 for r in reported if r.get("exposed") is not None)
    assert runs.log().count("exchange of gradients: buckets") == 3, "once in each group of ranks"
