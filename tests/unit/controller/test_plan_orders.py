"""Plans that jobs with `plan=auto` are ordered to run in, by their reports."""

import dataclasses

import pytest

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.trials.plan_speeds import REPORTS
from slurm_elastic.core.cluster import Allocation, Companion, Snapshot
from slurm_elastic.core.execution.plan_gains import PlanKind
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import job
from tests.unit.controller.test_report_handler import Site

AUTO = "1-8,plan=auto"
BATCH = 32


@pytest.fixture
def site(monkeypatch):
    site = Site()
    site.now = 2e9
    monkeypatch.setattr("time.time", lambda: site.now)
    yield site
    site.engine.close()
    site.ledger.close()


def train(site, of, plan="", *, speed=100.0, reports=REPORTS, run=0, **fields):
    """Let a job start in a plan and report its speed; return the plan that is ordered then."""
    gpus = of.allocation.gpus
    values = {
        "run": run, "gpus": gpus, "global_batch": BATCH, "proven": True, "startup_s": 2.0,
        "layout": plan.partition("+")[0] or f"{gpus}x1", "plan": plan,
        "supported_options": "stages=4,tensor",
    } | fields  # fmt: skip
    site.report(of, phase="starting", **values)
    for _ in range(reports):
        site.now += 10
        site.report(of, step_time_s=BATCH / speed, steps_measured=5, **values)
    site.now += 1000
    site.report(of, **values)
    return site.report_handler.orders(7, run, job=of).plan


def test_plans_are_ordered_only_with_the_directives_leave(site):
    assert train(site, job({"n1": 2})) == ""
    assert train(site, job({"n1": 2}, directive=AUTO)) == "1x1+tensor=2"


@pytest.mark.parametrize("fields", [{"proven": False}, {"kind": "script"}])
def test_a_job_that_cannot_resume_keeps_its_plan(site, fields):
    assert train(site, job({"n1": 2}, directive=AUTO), **fields) == ""


def test_a_controller_that_only_observes_orders_nothing(site):
    act, site.report_handler.handle = site.report_handler.handle, None
    site.report_handler.handle = lambda report, of, **_: act(report, of, act=False)
    assert train(site, job({"n1": 2}, directive=AUTO)) == ""


def test_a_held_job_keeps_its_plan(site):
    running = job({"n1": 2}, directive=AUTO)
    site.store.order(running, held=True)
    assert train(site, running) == ""


def test_the_layout_that_a_user_orders_takes_precedence(site):
    running = job({"n1": 2}, directive="1-8,parallel=hybrid,plan=auto")
    assert train(site, running) == ""
    assert site.report_handler.orders(7, 0, job=running).layout == "1x2"
    site.store.order(running, layout="2x1")
    assert site.report_handler.orders(7, 0, job=running).layout == "2x1"


def test_the_fastest_plan_is_kept_and_policies_learn_its_gain(site):
    running = job({"n1": 2}, directive=AUTO)
    assert train(site, running) == "1x1+tensor=2"
    assert train(site, running, "1x1+tensor=2", speed=150.0) == "1x1+tensor=2"
    (record,) = site.store.records(Snapshot(time=site.now, nodes=(), jobs=(running,)), {}).values()
    assert {(r.plan, r.samples_per_s) for r in record.plan_speeds} >= {
        ("", 100.0), ("1x1+tensor=2", 150.0),
    }  # fmt: skip
    assert record.ordered_plan == "1x1+tensor=2"
    entry = site.store.entry(running)
    (gain,) = {r.gain for r in entry.plan_trials.gains().rows if r.kind == PlanKind(tensor=2)}
    assert gain == 1.5
    # Its times are those of the own choice for the models, whatever plan it runs in.
    speeds = [o.step_s for o in entry.observations.observations()]
    assert speeds == [pytest.approx(BATCH / 100.0)]


def test_another_attempt_on_more_gpus_begins_with_the_best_kind_of_plan(site):
    running = job({"n1": 2}, directive=AUTO)
    train(site, running)
    train(site, running, "1x1+tensor=2", speed=150.0)
    grown = job({"n1": 4}, directive=AUTO, run=1)
    assert site.report_handler.orders(7, 1, job=grown).plan == "2x1+tensor=2"


def test_the_next_job_of_the_application_begins_with_what_is_known(site):
    first = job({"n1": 2}, directive=AUTO, name="gpt")
    train(site, first)
    train(site, first, "1x1+tensor=2", speed=150.0)
    snapshot = Snapshot(time=site.now, nodes=(), jobs=(first,))
    site.store.observe(snapshot)
    store = JobStore(site.ledger)  # of a later controller
    running = job({"n1": 4}, directive=AUTO, name="gpt", job_id=8, display_id="8")
    other = job({"n1": 4}, directive=AUTO, name="gpt", job_id=9, user="bob", uid=2002)
    for of, gain in ((running, 1.5), (other, None)):
        report = Report(
            job_id=of.job_id, run=0, phase="starting", gpus=4, layout="4x1", global_batch=BATCH
        )
        store.record_report(report, of, site.now)
        gains = store.entry(of).plan_trials.gains()
        kind = PlanKind(tensor=2)
        assert (gains and gains.of(kind, "a100", nodes=1, gpus=4)) == gain, of.user


def test_what_runs_out_of_memory_beside_another_job_on_one_gpu_goes_back_in_its_plan(site):
    half = Allocation.of("a100", {"n1": 1}, half=True)
    running = job({"n1": 1}, directive=AUTO)
    train(site, running, checkpoint_step=50)
    shared = dataclasses.replace(running, run=1, allocation=half, parts=(("n1", 0),))
    site.store.entry(running).trials.begun(1, 3)
    failed = {
        "run": 1, "gpus": 1, "phase": "ended", "exit_code": 1, "failed_start": 1,
        "out_of_memory": True, "checkpoint_step": 50,
    }  # fmt: skip
    site.report(shared, **{**failed, "phase": "starting", "failed_start": None, "exit_code": None})
    site.report(shared, **failed)
    entry = site.store.entry(shared)
    assert not entry.plan_trials.memory.failures
    assert entry.trials.shapes.half is not None
    assert site.report_handler.orders(7, 1, job=shared).on_failure != "restart"


def test_a_program_that_fails_in_a_new_plan_starts_again_without_it(site):
    running = job({"n1": 2}, directive=AUTO)
    assert train(site, running, checkpoint_step=50) == "1x1+tensor=2"
    failed = {"phase": "ended", "exit_code": 1, "failed_start": 2, "gpus": 2}
    site.report(running, **failed, checkpoint_step=50)
    orders = site.report_handler.orders(7, 0, job=running)
    assert (orders.failed_start, orders.on_failure, orders.plan) == (2, "restart", "")
    site.report(running, **failed, checkpoint_step=50)
    assert site.report_handler.orders(7, 0, job=running).on_failure == "restart"
    assert sum("FailedStart=2 Plan=own" in line for line in site.log.lines) == 1
    assert site.store.entry(running).trials.shapes.barred == [], "its size is not to blame"
    assert train(site, running, checkpoint_step=50) == ""


SIZE = {"weight_bytes": 10**9, "optimizer_bytes": 2 * 10**9, "peak_memory_bytes": 10**10}


def shrunk(site, **fields):
    """Let a job train on 4 GPUs, then run out of memory on 2 in its next attempt."""
    large = job({"n1": 4}, directive=AUTO)
    train(site, large, checkpoint_step=50, **SIZE)
    small = job({"n1": 2}, directive=AUTO, run=1)
    site.report_handler.orders(7, 1, job=small)
    report_lack(site, small, **fields)
    return small


def report_lack(site, of, start=1, **fields):
    values = {
        "run": of.run, "phase": "ended", "exit_code": 1, "failed_start": start, "gpus": 2,
        "checkpoint_step": 50, "out_of_memory": True, "global_batch": BATCH,
        "weight_bytes": 10**9,
    }  # fmt: skip
    site.report(of, **values | fields)


def test_a_size_at_which_memory_lacks_is_not_barred_but_gets_another_plan(site):
    small = shrunk(site)
    orders = site.report_handler.orders(7, 1, job=small)
    assert (orders.failed_start, orders.on_failure) == (1, "restart")
    assert orders.plan == "2x1+accumulation=1"
    entry = site.store.entry(small)
    assert entry.trials.shapes.barred == []
    assert entry.trials.on, "it is on trial as before"
    assert any("OutOfMemory=yes Plan=2x1+accumulation=1 GPUs=2" in x for x in site.log.lines)
    (record,) = site.store.records(Snapshot(time=site.now, nodes=(), jobs=(small,)), {}).values()
    (row,) = record.oversized_plans
    assert (row.gpu_type, row.gpus, row.plan) == ("a100", 2, "")


def test_where_no_plan_fits_the_size_is_barred_and_the_job_goes_back(site):
    small = shrunk(site)
    for start in range(2, 9):
        report_lack(site, small, start)
    entry = site.store.entry(small)
    assert [b.shape for b in entry.trials.shapes.barred] == [("a100", 2)]
    assert site.report_handler.orders(7, 1, job=small).on_failure == "wait"


@pytest.mark.parametrize("fields", [{"out_of_memory": False}, {"kind": "script"}])
def test_other_failures_bar_the_size_as_before(site, fields):
    small = shrunk(site, **fields)
    assert [b.shape for b in site.store.entry(small).trials.shapes.barred] == [("a100", 2)]
    assert site.report_handler.orders(7, 1, job=small).plan == ""


def test_a_first_start_that_lacks_memory_is_repeated_in_a_plan_that_needs_less(site):
    first = job({"n1": 2}, directive=AUTO)
    report_lack(site, first, checkpoint_step=None)
    orders = site.report_handler.orders(7, 0, job=first)
    assert (orders.on_failure, orders.plan) == ("restart", "2x1+accumulation=3")
    other = job({"n1": 2}, directive="1-8")
    site.store.entry(other).plan_trials.withdraw(site.now)
    report_lack(site, other, 2, checkpoint_step=None)
    assert site.report_handler.orders(7, 0, job=other).on_failure == "end"


def test_a_controller_that_only_observes_leaves_a_lack_of_memory_to_the_job(site):
    first = job({"n1": 2}, directive=AUTO)
    report = Report(
        job_id=7, run=0, phase="ended", exit_code=1, failed_start=1, gpus=2, out_of_memory=True,
        weight_bytes=10**9, global_batch=BATCH,
    )  # fmt: skip
    site.report_handler.handle(report, first, act=False)
    assert site.report_handler.orders(7, 0, job=first).on_failure == "end"


def test_a_shrink_in_place_that_lacks_memory_is_not_barred_either(site):
    large = job({"n1": 4}, directive=AUTO)
    train(site, large, checkpoint_step=50, **SIZE)
    companion = Companion(job_id=9, allocation=Allocation.of("a100", {"n2": 1}))
    both = job({"n1": 1, "n2": 1}, directive=AUTO, companions=(companion,))
    report_lack(site, both, 2, failed_gpus=2)
    entry = site.store.entry(both)
    assert entry.trials.shapes.barred == []
    assert entry.trials.held == both.base_allocation
    alone = job({"n1": 1}, directive=AUTO)
    orders = site.report_handler.orders(7, 0, job=alone)
    assert (orders.on_failure, orders.plan) == ("restart", "1x1+accumulation=3")


def test_a_size_at_which_a_companion_lacked_memory_begins_with_a_plan_that_needs_less(site):
    alone = job({"n1": 1}, directive=AUTO)
    train(site, alone, checkpoint_step=50, **SIZE)
    reason = Reason("companion-out-of-memory", job="9", gpus=2, nodes=2)
    lost = {"gpus": 1, "change": 5, "change_state": "done", "change_reason": reason}
    for _ in range(2):
        site.report(alone, **lost)
    noted = [x for x in site.log.lines if "OutOfMemory=companion Plan=own GPUs=2" in x]
    assert len(noted) == 1, "once, although the report comes again"
    assert site.report_handler.orders(7, 0, job=alone).plan == "", "it trains on"
    companion = Companion(job_id=10, allocation=Allocation.of("a100", {"n2": 1}))
    both = job({"n1": 1, "n2": 1}, directive=AUTO, companions=(companion,))
    assert site.report_handler.orders(7, 0, job=both).plan == "2x1+accumulation=3"


def test_sizes_that_the_directive_rules_out_are_not_learned_from_reports(site):
    alone = job({"n1": 1}, directive=AUTO)
    train(site, alone, checkpoint_step=50, **SIZE)
    for gpus in (0, 9, 2**31):
        reason = Reason("companion-out-of-memory", job="9", gpus=gpus, nodes=2)
        site.report(alone, gpus=1, change=gpus, change_state="done", change_reason=reason)
    assert site.store.entry(alone).plan_trials.memory.failures == {}


def test_a_base_that_lacks_memory_after_the_loss_of_a_companion_gets_a_plan_at_once(site):
    large = job({"n1": 4}, directive=AUTO)
    train(site, large, checkpoint_step=50, **SIZE)
    companion = Companion(job_id=9, allocation=Allocation.of("a100", {"n2": 1}))
    both = job({"n1": 1, "n2": 1}, directive=AUTO, companions=(companion,))
    report_lack(site, both, 2, gpus=1, failed_gpus=1)  # Slurm still shows the companion
    alone = job({"n1": 1}, directive=AUTO)
    orders = site.report_handler.orders(7, 0, job=alone)
    assert (orders.failed_start, orders.on_failure) == (2, "restart")
    assert orders.plan == "1x1+accumulation=1"


def test_without_the_directives_leave_any_more_the_job_chooses_again(site):
    running = job({"n1": 2}, directive=AUTO)
    assert train(site, running) == "1x1+tensor=2"
    without = job({"n1": 2}, directive="1-8")
    assert site.report_handler.orders(7, 0, job=without).plan == ""
