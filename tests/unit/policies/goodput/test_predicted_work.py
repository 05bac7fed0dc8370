"""Work left by predicted run times: of jobs without progress, less what they have done."""

import dataclasses

import numpy as np
import pytest

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.goodput import predicted_work
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.artifact_rules import ArtifactRules
from slurm_elastic.policies.sia.goodput_rows import Goodputs
from slurm_elastic.policies.sia.round_arrays import table
from tests.support.decisions.synthetic_clusters import Cluster, node


def ask(cluster, *, seconds=None, later_s=0.0, reported=np.nan, state=None):
    """Return the work left of the one job, its goodput, and the account."""
    snapshot = cluster.snapshot()
    snapshot = dataclasses.replace(snapshot, time=snapshot.time + later_s)
    length = None if seconds is None else DurationEstimate.of_sample([seconds])
    records = {
        job: dataclasses.replace(record, length=length) for job, record in cluster.records.items()
    }
    config = Config()
    question = Question(
        snapshot=snapshot,
        records=records,
        models={j: SpeedModel.fit(config.speedup, r.measurements) for j, r in records.items()},
        jobs=tuple(records),
        capacity={"a100": 8},
    )
    arrays = table(question, SiaSettings(), Goodputs(ArtifactRules.of(SiaSettings())))
    remaining, account = predicted_work.account(question, arrays, np.array([reported]), state or {})
    held = arrays.held[0]
    goodput = arrays.goodput[0, held] if held >= 0 else np.nan
    return remaining[0], goodput, account


def running():
    c = Cluster([node("a1", 8, "a100")])
    c.add(1, elastic="1-8", on={"a1": 4})
    return c


def test_work_is_the_predicted_time_at_the_present_speed_less_what_was_done():
    left, goodput, account = ask(running(), seconds=1000.0)
    assert left == pytest.approx(1000 * goodput, rel=0.01)
    later, _, account = ask(running(), seconds=1000.0, later_s=600.0, state=account)
    assert later == pytest.approx(400 * goodput, rel=0.02)
    beyond, _, _ = ask(running(), seconds=1000.0, later_s=3000.0, state=account)
    assert beyond > 0


def test_what_a_job_reports_counts_before_a_prediction():
    assert ask(running(), seconds=1000.0, reported=7.0)[0] == 7.0


def test_without_a_prediction_nothing_is_known():
    assert np.isnan(ask(running())[0])
