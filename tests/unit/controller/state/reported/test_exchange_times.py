"""Reports of steps whose gradients are exchanged during the backward pass."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.controller.state.reported.exchange_times import separated
from slurm_elastic.controller.state.reported.measurement import measured
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.report import Report
from slurm_elastic.models.links import CommunicationCost, Links
from slurm_elastic.models.live_communication import LiveCommunication
from slurm_elastic.models.speedup import SpeedModel

HELD = Allocation.of("a100", {"n1": 2, "n2": 2})
#: A step of 0.3 s of computing, and an exchange of 0.2 s.
FLAT = Report(
    job_id=7, run=0, phase="training", gpus=4, global_batch=64, step_time_s=0.5, steps_measured=10,
    micro_step_s=0.3, accumulation=0, forward_s=0.1, backward_s=0.2, sync_s=0.2,
    exchange="flat", exposed=1.0, exchange_s=0.2,
)  # fmt: skip


def buckets(exposed, *, after_s, **fields):
    """Return a report of the same computing, of whose exchange a rank sees the end only."""
    longer_s = exposed * 0.2 - after_s
    values = {
        "step_time_s": 0.3 + exposed * 0.2, "micro_step_s": 0.3 + longer_s,
        "backward_s": 0.2 + longer_s, "sync_s": after_s, "exchange": "buckets-1MiB",
        "exposed": exposed,
    }  # fmt: skip
    return dataclasses.replace(FLAT, **(values | fields))


def part(report):
    """Return the part of its time in which a job computes over two racks, and the clause of it."""
    measurement = measured(separated(report), HELD, 128.0, racks=1, old=None)
    measurement = dataclasses.replace(measurement, reports=3)
    record = JobRecord(job_id=7, measurements=(measurement,), gradient_bytes=1e8)
    cost = CommunicationCost.of(record, Links(rack=1e9, spine=1e9), {})
    model = SpeedModel.fit(SpeedupSettings(), (measurement,), cost)
    return LiveCommunication.of({7: record}, {7: model}).part("7", 4, (2, 2, 2))


def test_of_two_jobs_with_equal_gradients_the_one_that_hides_its_exchange_is_less_sensitive():
    """What counts is the exposed time, not what is left of it after the backward pass."""
    hidden, exposed = buckets(0.1, after_s=0.01), buckets(0.9, after_s=0.01)
    assert part(hidden) > part(exposed) + 0.1
    assert part(exposed) == pytest.approx(part(buckets(0.9, after_s=0.18)))
    assert part(exposed) > part(FLAT)


def test_a_pass_that_the_exchange_lengthens_is_not_computing():
    seen = separated(buckets(0.5, after_s=0.02))
    assert (seen.backward_s, seen.sync_s, seen.micro_step_s) == pytest.approx((0.2, 0.1, 0.3))
    assert seen.step_time_s == pytest.approx(0.4)


def test_of_several_micro_batches_one_is_lengthened():
    told = buckets(0.5, after_s=0.02, accumulation=3, micro_step_s=(4 * 0.3 + 0.08) / 4)
    assert separated(told).micro_step_s == pytest.approx(0.3)


@pytest.mark.parametrize(
    "told",
    [
        FLAT,
        dataclasses.replace(FLAT, exchange="", exposed=None, exchange_s=None),
        buckets(0.5, after_s=0.02, exchange_s=None),
        dataclasses.replace(buckets(0.5, after_s=0.02), exposed=None),
        buckets(0.5, after_s=0.1),
    ],
    ids=["flat", "no choice", "older library", "not measured", "all of it after the pass"],
)
def test_other_reports_stay_as_they_are(told):
    assert separated(told) == told


times = st.floats(0, 1e6)


@given(times, times, times, times, st.integers(0, 8))
def test_no_report_has_passes_of_negative_time(exposed, alone_s, backward_s, sync_s, more):
    told = dataclasses.replace(
        FLAT, exchange="buckets-4MiB", exposed=exposed, exchange_s=alone_s, accumulation=more,
        backward_s=backward_s, sync_s=sync_s,
    )  # fmt: skip
    seen = separated(told)
    assert 0 <= seen.backward_s <= backward_s
    assert seen.backward_s + seen.sync_s == pytest.approx(backward_s + sync_s)
    assert seen.sync_s - sync_s <= alone_s * (1 + 1e-9) + 1e-9
    assert 0.15 <= seen.micro_step_s <= 0.3
