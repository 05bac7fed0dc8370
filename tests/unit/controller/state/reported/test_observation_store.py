"""What reports teach: believed times, applications that share, and what survives."""

import contextlib
import dataclasses
import json
import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config import schema
from slurm_elastic.controller.state import ledger as ledgers
from slurm_elastic.controller.state import ledger_schema
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.reported.observations import (
    Observations,
    ObservedTime,
    counted_micro_batches,
)
from slurm_elastic.core.application import JobClass, Noise
from slurm_elastic.core.cluster import Allocation, JobState, Node, Snapshot
from slurm_elastic.core.report import Report
from slurm_elastic.models import application_jobs
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.models.type_rates import estimated, measured
from tests.support.controller.job_records import job

NODES = tuple(
    Node(name=name, gpu_type=kind, gpus=4)
    for name, kind in (("n1", "a100"), ("n2", "a100"), ("n3", "v100"))
)
STATED = schema.parse("[speedup]\ntypes = { a100 = 3.0 }")
SHARING = schema.parse("[sia]\nshare = true")


@pytest.fixture
def ledger():
    return Ledger(":memory:")


@pytest.fixture
def store(ledger):
    return JobStore(ledger, STATED)


def snapshot(*jobs, at=1000.0):
    return Snapshot(time=at, nodes=NODES, jobs=jobs)


def running(job_id=7, *, kind="a100", gpus=1, **fields):
    node = "n3" if kind == "v100" else "n1"
    return job(job_id=job_id, name="net", allocation=Allocation.of(kind, {node: gpus}),
               state=JobState.RUNNING, gpus=gpus, **fields)  # fmt: skip


def report(job_id=7, **fields):
    values = {"job_id": job_id, "run": 0, "phase": "training", "gpus": 1, "global_batch": 64,
              "step_time_s": 0.64, "steps_measured": 10, "micro_batch": 64, "accumulation": 0,
              "micro_step_s": 0.64, "initial_batch": 64}  # fmt: skip
    return Report(**(values | fields))


def learned(store, of):
    return store.records(snapshot(of), {})[of.job_id].learned


# --- times ---


def test_nothing_is_known_before_somebody_said_what_the_batch_is(store):
    assert learned(store, running()) is None


def test_a_step_without_its_accumulation_is_observed(store):
    of = running(gpus=2)
    fields = {"step_time_s": 1.0, "accumulation": 3, "micro_batch": 8, "micro_step_s": 0.2}
    store.record_report(report(gpus=2, **fields), of, 0.0)
    (seen,) = learned(store, of).observations
    assert (seen.gpu_type, seen.nodes, seen.gpus, seen.micro_batch) == ("a100", 1, 2, 8)
    assert (seen.step_s, seen.micro_step_s) == pytest.approx((0.4, 0.2))


@pytest.mark.parametrize("submitted", ["1-8", "2-8,unit=2"])
def test_times_are_learned_in_the_unit_of_the_directive_in_force(store, submitted):
    """The fit counts replicas of the unit of `selastic update`; so does what is learned."""
    of = running(gpus=4, directive=submitted)
    store.command(of, override="2-8,unit=2")
    store.record_report(
        report(gpus=4, accumulation=1, micro_step_s=0.2, max_micro_batch=32), of, 0.0
    )
    known = learned(store, of)
    assert [p.micro_batch for p in known.observations] == [16], "64 samples, 2 replicas, 2 steps"
    assert store.entry(of).observations.most == 64, "of a replica of 2 GPUs"


def test_only_times_of_the_present_shape_and_attempt_count(store):
    of = running()
    for lie in ({"gpus": 4}, {"run": 5}, {"steps_measured": 2}, {"step_time_s": None}):
        store.record_report(report(**lie), of, 0.0)
        known = learned(store, of)
        assert known is None or known.observations == ()
        store = JobStore(Ledger(":memory:"), STATED)


def test_times_beside_another_job_on_one_gpu_are_not_those_of_a_whole_one(store):
    half = {
        "allocation": Allocation.of("a100", {"n1": 1}, half=True), "parts": (("n1", 0),),
        "run": 1,
    }  # fmt: skip
    of, other = (dataclasses.replace(running(i), **half) for i in (7, 8))
    slow, fast = (report(run=1, step_time_s=s, micro_step_s=s) for s in (1.28, 0.64))

    def measured_speeds():
        known = learned(store, of)
        return [o.step_s for o in known.observations], list(store.entry(of).measurements)

    store.record_report(fast, of, 90.0)  # the first: whether another job was there is not known
    store.observe(snapshot(of, other, at=100.0))
    for now in (110.0, 120.0, 130.0):
        store.record_report(slow, of, now)
    store.observe(snapshot(of, other, at=135.0))
    store.observe(snapshot(of, at=138.0))  # the other one has ended
    store.record_report(slow, of, 140.0)  # part of the time it was there
    assert measured_speeds() == ([], [])
    store.record_report(fast, of, 150.0)
    assert measured_speeds() == ([0.64], ["a100:1:1"])


def test_values_that_tremble_leave_the_model_alone_and_a_real_change_is_believed(store):
    of = running()
    store.record_report(report(), of, 0.0)
    first = learned(store, of)
    for step_s in (0.65, 0.62, 0.66, 0.63, 1.5, 0.64):  # one outlier is none
        assert not store.record_report(report(step_time_s=step_s, micro_step_s=step_s), of, 0.0)
        assert learned(store, of) is first
    for _ in range(5):
        store.record_report(report(step_time_s=0.8, micro_step_s=0.8), of, 0.0)
    assert learned(store, of).observations[0].step_s == pytest.approx(0.8)


def test_times_that_change_all_the_time_are_passed_on_now_and_then(store):
    """A fit may cost a tenth of a second, and users have many jobs."""
    of, seen = running(), []
    for i in range(100):
        batch = 64 + i
        store.record_report(report(global_batch=batch, micro_batch=batch), of, 0.0)
        seen.append(store.records(snapshot(of, at=1000.0 + i), {})[7].learned)
    assert len({id(known) for known in seen}) == 1 + 5 + 1
    assert store.records(snapshot(of, at=2000.0), {})[7].learned.application.batch == 163
    store.command(of, override="1-2")  # what people decide counts at once
    store.record_report(report(global_batch=7, micro_batch=7), of, 0.0)
    assert store.records(snapshot(of, at=2000.0), {})[7].learned.application.batch == 7


def test_a_new_configuration_is_news(store):
    of = running()
    assert store.record_report(report(), of, 0.0)
    assert not store.record_report(report(), of, 0.0)
    assert store.record_report(report(micro_batch=32, accumulation=1, micro_step_s=0.3), of, 0.0)


def test_a_library_that_measures_nothing_of_this_is_understood(store):
    of = running(gpus=2)
    old = Report(job_id=7, run=0, phase="training", gpus=2, global_batch=64, step_time_s=0.5,
                 steps_measured=10)  # fmt: skip
    store.record_report(old, of, 0.0)
    (seen,) = learned(store, of).observations
    assert (seen.micro_batch, seen.step_s, seen.micro_step_s) == (32, 0.5, 0.5)


def test_a_report_without_a_step_looked_into_waits_for_the_next(store):
    of = running()
    store.record_report(report(micro_step_s=None), of, 0.0)
    assert learned(store, of).observations == ()
    store.record_report(report(micro_step_s=0.32), of, 0.0)
    for _ in range(5):
        store.record_report(report(step_time_s=1.28, micro_step_s=None), of, 0.0)
    (seen,) = learned(store, of).observations
    assert (seen.step_s, seen.micro_step_s) == pytest.approx((1.28, 0.64))


@pytest.mark.parametrize("steps", [1, 4])
def test_a_loop_that_measures_whole_steps_only_is_learned_from_after_some_reports(store, steps):
    of = running()
    fields = {"micro_step_s": None, "accumulation": steps - 1, "micro_batch": 64 // steps}
    for _ in range(2):
        assert learned(store, of) is None or not learned(store, of).observations
        store.record_report(report(**fields), of, 0.0)
    (seen,) = learned(store, of).observations
    assert (seen.step_s, seen.micro_step_s) == pytest.approx((0.64 / steps, 0.64 / steps))
    # The first measurement counts at once.
    store.record_report(report(**(fields | {"micro_step_s": 0.1})), of, 0.0)
    (seen,) = learned(store, of).observations
    assert seen.micro_step_s == pytest.approx(0.1)


# --- pipelines ---


def staged(gpus, **fields):
    """Return a report of replicas of two stages, in passes of eight micro-batches."""
    share = 2 * 64 // gpus
    values = {"gpus": gpus, "layout": f"{gpus // 2}x2", "micro_batch": share, "micro_batches": 8,
              "step_time_s": 0.5, "micro_step_s": 0.4}  # fmt: skip
    return report(**(values | fields))


def test_one_pass_of_a_pipeline_is_observed(store):
    of = running(gpus=4, directive="2-8,unit=2,parallel=hybrid")
    store.record_report(staged(4), of, 0.0)
    known = learned(store, of)
    assert known.application.micro_batches == 8
    assert known.application.types[0].unit == 2
    (seen,) = known.observations
    assert (seen.gpus, seen.micro_batch, seen.step_s, seen.micro_step_s) == (4, 4, 0.5, 0.4)


def test_a_pipeline_of_an_older_library_is_observed_at_once(store):
    """It reports accumulated micro-batches of each rank, and no time of a pass."""
    of = running(gpus=4, directive="2-8,unit=2,parallel=hybrid")
    older = {"micro_batches": None, "micro_step_s": None, "micro_batch": 8, "accumulation": 3}
    store.record_report(staged(4, **older), of, 0.0)
    known = learned(store, of)
    assert known.application.micro_batches == 1
    (seen,) = known.observations
    assert (seen.micro_batch, seen.step_s, seen.micro_step_s) == (32, 0.5, 0.5)


def test_the_fewest_micro_batches_count_and_survive_a_restart(store, ledger):
    of = running(gpus=4, directive="2-8,unit=2,parallel=hybrid")
    for count in (8, 4, 8):
        store.record_report(staged(4, micro_batches=count, max_micro_batch=8), of, 0.0)
    store.observe(snapshot(of))
    again = JobStore(ledger, STATED)
    for known in (learned(store, of), learned(again, of)):
        assert known.application.micro_batches == 4
        assert {t.most for t in known.application.types} == {64}, "it divides its share itself"


def test_a_pipeline_with_an_elastic_batch_runs_shares_that_were_measured():
    store = JobStore(Ledger(":memory:"), STATED)
    store.learning.adaptive_batches = True
    of = running(gpus=4, directive="2-8,unit=2,parallel=hybrid,batch=64-512")
    store.record_report(staged(4), of, 0.0)
    known = learned(store, of).application
    assert (known.job_class, known.micro_batches) == (JobClass.ADAPTIVE, 8)
    assert [t.most for t in known.types] == [8, 8], "64 samples on one replica, in 8 parts"
    store.record_report(staged(4, max_micro_batch=8), of, 0.0)
    assert [t.most for t in learned(store, of).application.types] == [512, 512]


@given(st.integers(1, 2**31), st.integers(1, 2**31), st.integers(1, 4096), st.integers(1, 4096))
def test_counted_micro_batches_describe_every_share(fewest, batch, one, other):
    least, most = sorted((one, other))
    count = counted_micro_batches(fewest, batch, [least, most])
    assert 1 <= count <= fewest
    if count > 1:
        for replicas in (least, most):
            share = batch / replicas
            assert -(-batch // (replicas * count)) * count <= 1.05 * share


def test_noise_is_kept_until_it_differs(store):
    of = running()
    store.record_report(report(grad_sqr=2.0, grad_var=8.0), of, 0.0)
    store.record_report(report(grad_sqr=2.1, grad_var=8.1), of, 0.0)
    assert learned(store, of).noise == Noise(2.0, 8.0)
    store.record_report(report(grad_sqr=1.0, grad_var=8.0), of, 0.0)
    assert learned(store, of).noise == Noise(1.0, 8.0)
    store.record_report(report(grad_sqr=0.0, grad_var=0.0), of, 0.0)
    assert learned(store, of).noise == Noise(1.0, 8.0)


# --- the exchange of gradients ---

FLAT = {"gpus": 2, "micro_batch": 32, "step_time_s": 0.5, "micro_step_s": 0.3,
        "exchange": "flat", "exposed": 1.0, "exchange_s": 0.2}  # fmt: skip
BUCKETS = FLAT | {"step_time_s": 0.4, "exchange": "buckets-1MiB", "exposed": 0.5,
                  "forward_s": 0.1, "backward_s": 0.28, "sync_s": 0.02,
                  "micro_step_s": 0.38}  # fmt: skip


def test_times_of_another_schedule_are_another_curve(store, ledger):
    alone, of, wide = running(), running(gpus=2), running(gpus=4)
    store.record_report(report(), alone, 0.0)
    store.record_report(report(**FLAT), of, 0.0)
    store.record_report(report(**(FLAT | {"gpus": 4, "micro_batch": 16})), wide, 0.0)
    assert [o.step_s for o in learned(store, of).observations] == [0.64, 0.5, 0.5]
    store.record_report(report(**BUCKETS), of, 0.0)
    store.observe(snapshot(of))
    for known in (store, JobStore(ledger, STATED)):
        single, seen = learned(known, of).observations
        assert (single.gpus, single.step_s) == (1, 0.64), "nothing is exchanged there"
        assert (seen.step_s, seen.micro_step_s) == pytest.approx((0.4, 0.3))
        assert (seen.exchange, seen.exchange_s) == ("buckets", 0.2)
    store.record_report(report(), alone, 0.0)
    assert [o.step_s for o in learned(store, alone).observations] == [0.64, 0.4]
    store.record_report(report(**FLAT), of, 0.0)
    assert [o.step_s for o in learned(store, of).observations] == [0.64, 0.5, 0.5]


def test_the_first_steps_of_an_attempt_are_no_new_choice_of_a_schedule(store):
    of, before_trial = running(gpus=2), FLAT | {"exposed": None, "exchange_s": None}
    for fields, curve in ((before_trial, ""), (BUCKETS, "buckets"), (before_trial, "buckets")):
        store.record_report(report(**fields), of, 0.0)
        assert {o.exchange for o in learned(store, of).observations} == {curve}
    store.record_report(report(**FLAT), of, 0.0)
    assert {o.exchange for o in learned(store, of).observations} == {""}


def test_buckets_of_all_sizes_are_one_curve_whose_times_are_not_averaged(store):
    of, wide = running(gpus=2), running(gpus=4)
    fields = BUCKETS | {"gpus": 4, "micro_batch": 16, "exchange": "buckets-4MiB"}
    store.record_report(report(**fields), wide, 0.0)
    for _ in range(5):
        store.record_report(report(**BUCKETS | {"step_time_s": 0.9}), of, 0.0)
    store.record_report(report(**BUCKETS | {"exchange": "buckets-256KiB"}), of, 0.0)
    assert [(o.gpus, o.step_s) for o in learned(store, of).observations] == [(4, 0.4), (2, 0.4)]


def test_a_ledger_without_schedules_is_read_as_before(store, ledger):
    of = running(gpus=2)
    store.record_report(report(**FLAT), of, 0.0)
    store.observe(snapshot(of))
    body = store.entry(of).to_body()
    del body["lesson"]["exchange"], body["lesson"]["points"][0]["exchange"]
    del body["lesson"]["points"][0]["exchange_s"]
    ledger.put_job(of.key, of.job_id, body)
    old = JobStore(ledger, STATED)
    (seen,) = learned(old, of).observations
    assert (seen.step_s, seen.exchange, seen.exchange_s) == (0.5, "", None)
    old.record_report(report(**(FLAT | {"exchange": "", "exchange_s": None})), of, 0.0)
    assert learned(old, of).observations == (seen,)


def test_the_next_job_inherits_the_curve_of_the_newest_schedule(ledger):
    store = JobStore(ledger, SHARING)
    store.learning.shares_measurements = True
    for i, fields in ((1, FLAT), (2, BUCKETS)):
        store.record_report(report(i, **fields), running(i, gpus=2), 0.0)
    store.observe(snapshot(running(1), running(2)))
    following = job(job_id=3, name="net")
    for known in (store, JobStore(ledger, SHARING)):
        known.learning.shares_measurements = True
        (seen,) = learned(known, following).observations
        assert (seen.exchange, seen.step_s, seen.exchange_s) == ("buckets", 0.4, 0.2)
        (of_flat,) = learned(known, running(1, gpus=2)).observations
        assert (of_flat.exchange, of_flat.step_s) == ("", 0.5)


# --- the application ---


def test_a_fixed_batch_scales_strongly_and_a_fixed_size_is_rigid(store):
    for directive, expected in (("1-8", JobClass.STRONG_SCALING), ("4-4", JobClass.RIGID)):
        of = running(directive=directive)
        store.record_report(report(max_micro_batch=16, application="resnet"), of, 0.0)
        known = learned(store, of).application
        assert known.job_class is expected
        assert (known.name, known.batch, known.max_batch, known.initial_batch) == (
            ("resnet", 64, 64, 64)
        )
        assert [(t.gpu_type, t.least, t.most) for t in known.types] == [
            ("a100", 1, 16), ("v100", 1, 16)]  # fmt: skip


def test_types_that_a_directive_leaves_out_cannot_run_it(store):
    of = running(directive="1-8,types=a100")
    store.record_report(report(), of, 0.0)
    assert [t.gpu_type for t in learned(store, of).application.types] == ["a100"]


def test_a_type_never_run_on_is_worth_what_the_configuration_says(store):
    of = running()
    store.record_report(report(), of, 0.0)
    single = {t.gpu_type: t.single for t in learned(store, of).application.types}
    assert single == pytest.approx({"a100": 100.0, "v100": 100.0 / 3})


def test_a_rigid_job_has_a_rate_on_every_type(store):
    of = running(directive="2-2", gpus=2)
    store.record_report(report(gpus=2, micro_batch=32, step_time_s=0.5, micro_step_s=0.4), of, 0.0)
    rate = {t.gpu_type: t.rate for t in learned(store, of).application.types}
    assert rate == pytest.approx({"a100": 128.0, "v100": 128.0 / 3})


def test_the_next_job_knows_what_each_type_is_worth(store, ledger):
    one, other = running(1, kind="a100"), running(2, kind="v100")
    store.record_report(report(1), one, 0.0)
    store.record_report(report(2), other, 0.0)
    store.observe(snapshot(one, other))
    for again in (store, JobStore(ledger, STATED), JobStore(ledger, SHARING)):
        waits = job(job_id=3, name="net")
        known = learned(again, waits)
        assert {t.gpu_type: t.single for t in known.application.types} == pytest.approx(
            {"a100": 100.0, "v100": 100.0})  # fmt: skip
        assert len(known.observations) == (2 if again.learning.config is SHARING else 0)


def test_nobody_learns_from_another_user_or_name(store):
    store.record_report(report(1), running(1), 0.0)
    assert learned(store, job(job_id=2, name="net", user="bob")) is None
    assert learned(store, job(job_id=2, name="other")) is None


def test_scripts_of_one_name_may_say_what_they_train(store):
    one, other = running(1), running(2)
    store.record_report(report(1, application="big", step_time_s=6.4, micro_step_s=6.4), one, 0.0)
    store.record_report(report(2, application="small"), other, 0.0)
    assert learned(store, one).application.types[0].single == pytest.approx(10.0)
    assert learned(store, other).application.types[0].single == pytest.approx(100.0)


def test_another_model_under_the_same_name_starts_anew():
    store = JobStore(Ledger(":memory:"), SHARING)
    store.record_report(report(1, gpus=2, micro_batch=32), running(1, gpus=2), 0.0)
    store.record_report(report(1), running(1), 0.0)
    of = running(2)
    store.record_report(report(2, step_time_s=9.0, micro_step_s=9.0), of, 0.0)
    assert [o.step_s for o in learned(store, of).observations] == [9.0]


def test_an_earlier_jobs_times_give_way_to_the_jobs_own():
    store = JobStore(Ledger(":memory:"), SHARING)
    store.record_report(report(1, gpus=2, micro_batch=32), running(1, gpus=2), 0.0)
    of = running(2)
    store.record_report(report(2), of, 0.0)
    assert [o.gpus for o in learned(store, of).observations] == [2, 1]
    of = running(2, gpus=2)
    store.record_report(report(2, gpus=2, micro_batch=32, step_time_s=1.0), of, 0.0)
    assert [o.step_s for o in learned(store, of).observations] == [1.0, 0.64]


@pytest.mark.parametrize(("pools", "inherited"), [(True, 10.0), (False, 5000.0)])
def test_a_new_job_starts_with_the_noise_that_its_application_showed_first(
    ledger, pools, inherited
):
    for name in ("first", "after a restart of the controller"):
        store = JobStore(ledger, STATED if pools else SHARING)
        store.learning.shares_measurements = pools
        store.learning.residual_models = pools
        if name == "first":
            for variance in (10.0, 5000.0):
                told = report(1, grad_sqr=1.0, grad_var=variance)
                store.record_report(told, running(1), 0.0)
            store.observe(snapshot(running(1)))
        known = learned(store, job(job_id=2, name="net"))
        assert known.noise.var == inherited
        assert len(known.observations) == 1
        assert known.residuals is pools


def point(kind, micro_batch, rate):
    return ObservedTime(kind, 1, 1, micro_batch, micro_batch / rate, micro_batch / rate)


def test_types_are_compared_at_like_batches():
    points = [point("a", 8, 80.0), point("a", 64, 160.0), point("b", 8, 40.0)]
    assert measured(points) == pytest.approx({"a": 80.0, "b": 40.0})
    assert measured([*points[:2], point("b", 60, 70.0)]) == pytest.approx({"a": 160.0, "b": 70.0})
    assert measured([]) == {}


def test_stated_ratios_fill_in():
    stated = {"a": 2.0, "c": 8.0}
    assert estimated([], ["a", "b"], stated, earlier={}) == {"a": 2.0, "b": 1.0}
    known = estimated([point("a", 8, 100.0)], ["a", "b", "c"], stated, earlier={"b": 70.0})
    assert known["a"] == pytest.approx(100.0)
    assert known["b"] == 70.0
    assert known["c"] == pytest.approx(8 * (50.0 * 70.0) ** 0.5)


# --- the pool of an application ---


def pooling(ledger=None):
    store = JobStore(ledger or Ledger(":memory:"), STATED)
    store.learning.shares_measurements = store.learning.residual_models = True
    return store


def measure(store, job_id, factor, *, shapes=(1, 2, 4), at=0.0, **fields):
    """Report a job that takes `factor` times as long as the mean one; return the job."""
    for gpus in shapes:
        of = running(job_id, gpus=gpus, **fields)
        seconds = factor * (0.64 / gpus + 0.02)
        told = report(job_id, gpus=gpus, micro_batch=64 // gpus, step_time_s=seconds,
                      micro_step_s=factor * 0.64 / gpus)  # fmt: skip
        store.record_report(told, of, at)
    return of


def steps_of(store, of):
    return {o.gpus: o.step_s for o in learned(store, of).observations}


def test_a_job_that_takes_longer_inherits_longer_times(ledger):
    store = pooling(ledger)
    for job_id, factor in enumerate((0.7, 0.85, 1.0, 1.2, 1.4), start=1):
        measure(store, job_id, factor)
    slow = measure(store, 9, 1.8, shapes=(1,))
    assert steps_of(store, slow)[1] == pytest.approx(1.8 * 0.66), "its own times as they are"
    assert steps_of(store, slow)[4] == pytest.approx(1.8 * 0.18, rel=0.12)
    new = job(job_id=10, name="net")
    assert steps_of(store, new)[4] == pytest.approx(0.18, rel=0.25), "of a mean job"
    before = steps_of(store, new)
    store.observe(snapshot(slow, new))
    assert steps_of(pooling(ledger), new) == pytest.approx(before), "jobs are told apart later, too"


def test_the_pool_of_one_user_is_not_that_of_another():
    store = pooling()
    measure(store, 1, 1.0)
    measure(store, 2, 2.5, user="bob")
    assert steps_of(store, job(job_id=3, name="net"))[4] == pytest.approx(0.18)
    assert steps_of(store, job(job_id=4, name="net", user="bob"))[4] == pytest.approx(0.45)
    assert learned(store, job(job_id=5, name="net", user="carol")) is None


def test_an_application_of_an_earlier_release_is_a_pool_of_one_job(ledger):
    store = JobStore(ledger, STATED)
    of = measure(store, 1, 1.0)
    store.observe(snapshot(of))
    body = ledger.applications("alice", "net")[""]
    del body["jobs"]
    ledger.put_application("alice", "net", "", body)
    assert steps_of(pooling(ledger), job(job_id=3, name="net"))[4] == pytest.approx(0.18)


def test_reports_of_many_jobs_cost_few_pools(monkeypatch):
    made = []
    original = application_jobs.pooled
    monkeypatch.setattr(application_jobs, "pooled", lambda jobs: made.append(1) or original(jobs))
    store = pooling()
    jobs = [measure(store, i, 1.0) for i in range(1, 31)]
    store.records(snapshot(*jobs), {})
    kept = store.learning.shared(jobs[0], store.entry(jobs[0]).observations).jobs
    assert list(kept.jobs) == [j.key for j in jobs[-20:]], "the newest"
    del made[:]
    for number in range(20):
        for of in jobs:
            measure(store, of.job_id, 1.0 + 0.1 * (number + of.job_id % 7), shapes=(4,))
        store.records(snapshot(*jobs, at=1001.0 + number), {})
    assert len(made) == 0, "within a minute the same jobs' pool stays"
    store.records(snapshot(*jobs, at=1100.0), {})
    assert len(made) == 1
    store.records(snapshot(*jobs, at=1200.0), {})
    assert len(made) == 1, "nothing has changed"


@pytest.mark.parametrize(
    "body",
    [
        None,
        [5, {"job": 7}, {"job": "1@1"}, {"job": "1@1", "points": 3, "first_noise": [0, 0]}],
        [{"job": "1@1", "points": [[], ["t4", 1, 1, 8, 0.1, 0.2], ["t4", 1, 1, 8, "a", 0.2]]}],
        [{"job": "1@1", "points": [["t4", 1, 1.5, 8, 0.3, 0.2], ["t4", 0, 1, 8, 0.3, 0.2]]}],
        [{"job": "1@1", "points": [["t4", 1, 1, 8, float("inf"), 0.2]]}],
    ],
)
def test_invalid_jobs_in_the_ledger_are_left_out(body):
    assert application_jobs.ApplicationJobs.from_body(body).jobs == {}


def test_jobs_start_with_the_noise_of_the_first_stage_of_training():
    store = pooling()
    for job_id, scale in ((1, 30.0), (2, 10.0), (3, 50.0)):
        for progress, factor in ((0.0, 0.2), (0.04, 1.0), (0.3, 9.0)):
            told = report(job_id, grad_sqr=1.0, grad_var=factor * scale, progress=progress)
            store.record_report(told, running(job_id), 0.0)
    assert learned(store, job(job_id=4, name="net")).noise.var == 30.0, "of the median job"
    assert learned(store, running(2)).noise.var == 90.0, "its own, which is the latest"


# --- what survives ---


def test_it_survives_a_restart(store, ledger):
    of = running()
    store.record_report(report(grad_sqr=1.0, grad_var=2.0, max_micro_batch=16), of, 0.0)
    store.observe(snapshot(of))
    again = JobStore(ledger, STATED)
    assert learned(again, of) == learned(store, of)


def test_resizes_are_counted_in_the_record(store):
    of = running()
    store.command(of, resizes=3)
    assert store.records(snapshot(of), {})[7].resizes == 3


def test_a_ledger_of_the_first_version_is_taken_over(tmp_path):
    path = tmp_path / "ledger.sqlite"
    speeds = {"a": {"gpu_type": "a100", "gpus": 2, "nodes": 1, "samples_per_s": 400.0, "steps": 9},
              "b": {"gpu_type": "v100", "gpus": 1, "nodes": 1, "samples_per_s": 50.0, "steps": 9},
              "c": 5}  # fmt: skip
    record = json.dumps({"job_id": 1, "measurements": speeds})
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(f"{ledger_schema.VERSIONS[0]} PRAGMA user_version = 1;")
        db.execute("INSERT INTO jobs VALUES ('1@1', 1, 1.0, ?)", (record,))
        db.execute(
            "INSERT INTO segments VALUES "
            "('1@1', 1, 'alice', 'net', 0, 'a100', 2, 'n1:2', 1.0, NULL)"
        )
        db.commit()
    for _ in range(2):  # the second time it is of this version
        ledger = Ledger(path)
        store = JobStore(ledger, STATED)
        of = running(2, kind="v100")
        store.record_report(
            report(2, application="typed", step_time_s=1.28, micro_step_s=1.28), of, 0.0
        )
        known = {t.gpu_type: t.single for t in learned(store, of).application.types}
        assert known == pytest.approx({"a100": 200.0, "v100": 50.0})
        ledger.close()


def test_names_without_end_do_not_fill_the_ledger(ledger, monkeypatch):
    monkeypatch.setattr(ledgers, "APPLICATIONS", 3)
    for i in range(6):
        ledger.put_application("alice", f"n{i}", "", {})
    ledger.put_application("bob", "n", "", {})
    left = [i for i in range(6) if ledger.applications("alice", f"n{i}")]
    assert left == [3, 4, 5]
    assert "" in ledger.applications("bob", "n")
    ledger.forget(4e9, keep_days=90, keep_mb=1024)
    assert ledger.applications("bob", "n") == {}


def test_statements_without_end_do_not_fill_the_memory(store):
    of = running()
    for i in range(100):
        store.record_report(report(application=f"a{i}"), of, 0.0)
    assert len(store.learning._of(of)) == 20
    assert learned(store, of).application.name == "a99"


def test_configurations_without_end_do_not_fill_a_record(store):
    of = running()
    for batch in range(1, 400):
        store.record_report(report(global_batch=batch, micro_batch=batch), of, 0.0)
    assert len(learned(store, of).observations) == 128


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
rows = st.fixed_dictionaries(
    {},
    optional={
        "gpu_type": st.just("a100") | json_values,
        **{n: st.integers(1, 9) | json_values for n in ("nodes", "gpus", "micro_batch")},
        **{n: st.floats(1e-6, 9) | json_values for n in ("step_s", "micro_step_s")},
        "recent": json_values,
    },
)


@given(json_values | st.fixed_dictionaries({}, optional={
    "points": st.lists(rows, max_size=3) | json_values, "noise": json_values, "rates": json_values,
    "batch": json_values, "stated": json_values}))  # fmt: skip
def test_whatever_lies_in_the_ledger_is_read_or_left_out(body):
    observations = Observations.from_body(body)
    assert Observations.from_body(observations.to_body()) == observations


reports = st.fixed_dictionaries(
    {"gpus": st.sampled_from([1, 2, 4])},
    optional={
        **{n: st.none() | st.integers(0, 2**31) | st.integers(0, 64)
           for n in ("global_batch", "micro_batch", "accumulation", "initial_batch",
                     "max_micro_batch")},
        **{n: st.none() | st.floats(0, 1e6) for n in ("step_time_s", "micro_step_s")},
        **{n: st.none() | st.floats(0, 1e30) for n in ("grad_sqr", "grad_var")},
    },
)  # fmt: skip


@given(st.lists(reports, max_size=4), st.sampled_from(["1-8", "4-4", "2-8,unit=2"]), st.booleans())
def test_no_report_makes_a_model_impossible(told, directive, share):
    store = JobStore(Ledger(":memory:"), SHARING if share else STATED)
    for i, fields in enumerate(told):
        of = running(i % 2, gpus=fields["gpus"], directive=directive)
        store.record_report(Report.from_wire(report(i % 2, **fields).to_wire()), of, 0.0)
    for of in (running(0, directive=directive), job(job_id=9, name="net", directive=directive)):
        known = learned(store, of)
        if known is not None:
            model = GoodputModel.of(known)
            assert all(v >= 0 for v in model.goodputs("v100", 1, [2, 4]))
