"""Batches that the policy chose: how running jobs come to them, and who is left alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.batch_tuning import BatchTuner, restrict_to_order
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.core.application import Application, JobClass, Learned, Observation, TypeProfile
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action, Decision, JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.core.submission import Submission
from tests.support.decisions.reasons import words

FOUR = Allocation.of("a100", {"n1": 4})


def learned(micro=64, **fields):
    values = {"name": "net", "initial_batch": 64, "max_batch": 4096, "batch": 64}
    application = Application(types=(TypeProfile("a100", least=1, most=512),), **(values | fields))
    return Learned(application, (Observation("a100", 1, 4, micro, 0.2, 0.1),))


def job(directive="1-8,batch=64-4096", job_id=7):
    return Job(
        job_id=job_id, display_id=str(job_id), name="net", user="alice", uid=1000,
        state=JobState.RUNNING, submit_time=0.0, start_time=0.0, run=0, partition="gpu",
        submission=Submission(Directive.parse(directive)), allocation=FOUR, gpus=4,
        gpu_type="a100",
    )  # fmt: skip


def report(batch=256, **fields):
    values = {
        "job_id": 7,
        "phase": "training",
        "run": 0,
        "kind": "library",
        "gpus": 4,
        "global_batch": batch,
        "micro_batch": 64,
    }
    return Report(**(values | fields))


def decision(batch, *, target=FOUR, job_id=7):
    action = Action.KEEP if target == FOUR else Action.GROW
    return Decision(
        job_id=job_id,
        current=FOUR,
        target=target,
        action=action,
        reason=Reason("waits"),
        batch=batch,
    )


class TunedJob:
    def __init__(self, *, policy_chooses=True):
        self.outbox = OrderOutbox()
        self.tuner = BatchTuner(self.outbox.tell, policy_chooses=policy_chooses)
        self.record = JobRecord(job_id=7, learned=learned())

    def round(self, of, batch, told):
        decided = {7: decision(batch)}
        snapshot = Snapshot(time=1000.0, nodes=(), jobs=(of,))
        return self.tuner.round(snapshot, {7: self.record}, {7: told}, act=True, decided=decided)

    def batch(self, run=0):
        return self.outbox.orders(7, run).batch


def test_a_job_comes_to_the_batch_of_its_policy_by_doubling():
    tuned, of, present, way = TunedJob(), job(), 256, []
    while tuned.round(of, 1600, report(present)):
        present = tuned.batch()
        way.append(present)
        tuned.record = dataclasses.replace(tuned.record, learned=learned(micro=present // 4))
    assert way == [512, 1024, 1600]
    assert tuned.tuner.choices[7].batch == 1600
    ((_, choice),) = tuned.round(of, 400, report(1600))
    assert (choice.batch, words(choice.reason)) == (400, "the policy chose 400 for 4 GPUs")


def test_no_further_than_memory_is_known_to_take():
    def next_step(**known):
        return restrict_to_order(learned(**known), FOUR, 256, batch=2048, limits=(64, 4096)).batch

    assert next_step(micro=16) == 512  # the library accumulates
    assert next_step(micro=16, accumulation=False) == 256
    assert next_step(micro=48, accumulation=False) == 384


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 16))
def test_it_stays_within_the_directive(present, batch, low, factor):
    high = low * factor
    found = restrict_to_order(learned(), FOUR, present, batch=batch, limits=(low, high))
    assert low <= found.batch <= high
    assert (
        found.batch
        == restrict_to_order(learned(), FOUR, present, batch=batch, limits=(low, high)).batch
    )


def test_who_is_left_alone():
    tuned = TunedJob()
    assert tuned.round(job(), None, report()) == []  # the policy names none for it
    assert tuned.tuner.choices == {}
    tuned.outbox.tell(7, run=0, batch=512)
    assert tuned.round(job(), None, report(512)) == []
    assert tuned.batch() == 512  # what stands goes on
    assert tuned.round(job("1-8"), 1024, report()) == []  # its directive says nothing of batches
    assert tuned.batch() is None
    script = TunedJob()
    assert script.round(job(), 512, report(kind="script")) == []


def test_under_other_policies_the_batch_is_chosen_for_goodput():
    tuned = TunedJob(policy_chooses=False)
    tuned.record = JobRecord(job_id=7, learned=learned(job_class=JobClass.STRONG_SCALING))
    assert tuned.round(job(), 1024, report()) == []
    assert tuned.batch() is None


@pytest.mark.parametrize(("batch", "expected"), [(512, 512), (None, None)])
def test_a_job_on_its_way_begins_there_with_the_batch_for_there(batch, expected):
    tuned, of = TunedJob(), job()
    eight = Allocation.of("a100", {"n1": 4, "n2": 4})
    snapshot = Snapshot(time=1000.0, nodes=(), jobs=(of,))
    begun = [decision(batch, target=eight)]
    tuned.tuner.ahead(begun, snapshot, {7: tuned.record}, {7: report()})
    assert (tuned.batch(run=0), tuned.batch(run=1)) == (None, expected)
