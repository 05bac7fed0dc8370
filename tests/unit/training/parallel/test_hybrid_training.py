"""A hybrid job measures its layers and restarts in a better layout."""

from __future__ import annotations

from pathlib import Path

from slurm_elastic.job.rank_socket import RESTART_CODE
from tests.support.trainings.training_runs import FakeLauncher, TrainingRuns


def test_a_hybrid_job_restarts_in_the_layout_for_its_measured_layers(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    runs = TrainingRuns(tmp_path / "hybrid")
    options = {
        "directive": "1-2,parallel=hybrid",
        # On which gradients take long and activations do not: two stages, no replicas.
        "environment": {"SLURM_ELASTIC_BANDWIDTH": "2e5,2e5"},
        "epochs": 6,
        "model": "narrow",
    }
    runs.start(2, launcher=launcher, **options)
    assert runs.join() == [RESTART_CODE] * 2, runs.log()
    assert "data parallel until the layers have been measured" in runs.log()
    runs.start(2, launcher=launcher, **options)
    assert runs.join() == [0] * 2, runs.log()
    assert runs.layouts() == ["2x1", "1x2"]
    assert "times as fast as 2x1" in runs.log()
    assert sorted(runs.losses()) == list(range(1, 6 * 6 + 1))
