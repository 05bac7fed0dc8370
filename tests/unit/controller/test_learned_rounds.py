"""Policy sia with observations from reports: as test_sia_rounds.py, without Slurm.

Two applications: `typed` is twice as fast on an a100, `even` equally fast on both types.
"""

from dataclasses import replace

import pytest

from slurm_elastic.config import schema
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

CONFIG = schema.parse(
    '[controller]\npolicy = "sia"\n[resize]\nmin_interval_s = 2\nper_hour = 3600\nrestart_s = 1\n'
    "[speedup]\ntypes = { a100 = 2.0, v100 = 1.0 }"
)
BATCH, RATE = 32, 80.0
SPEED = {("typed", "a100"): 2.0}


def cluster(*, at: float = 0.0, a100: int = 3):
    """So many idle a100, and three idle v100; the others are taken."""
    c = Cluster([node("g1", 4, gpu_type="a100"), node("g3", 4, gpu_type="v100")], time=NOW + at)
    c.add(90, on={"g1": 4 - a100})
    c.add(91, on={"g3": 1})
    return c


def start(c: Cluster, job_id: int, name: str, on: dict[str, int]) -> None:
    c.add(job_id, elastic="1-2,types=v100:a100", on=on, submit_time=NOW, start_time=NOW)
    c.jobs[-1] = replace(c.jobs[-1], name=name, user="alice")


def measured(c: Cluster, job_id: int) -> Report:
    """What the job reports where it is."""
    job = next(j for j in c.jobs if j.job_id == job_id)
    held = job.allocation
    rate = RATE * SPEED.get((job.name, held.gpu_type), 1.0)
    micro_s = BATCH / held.gpus / rate
    return Report(job_id=job_id, run=0, phase="training", gpus=held.gpus, global_batch=BATCH,
                  step_time_s=micro_s + (0.005 if held.gpus > 1 else 0.0), steps_measured=20,
                  micro_batch=BATCH // held.gpus, accumulation=0, micro_step_s=micro_s,
                  proven=True, initial_batch=BATCH, application=job.name)  # fmt: skip


def tell(store: JobStore, c: Cluster, *jobs: int) -> None:
    for job_id in jobs:
        store.record_report(
            measured(c, job_id), next(j for j in c.jobs if j.job_id == job_id), c.time
        )
    store.observe(c.snapshot())


def decided(store: JobStore, c: Cluster):
    snapshot = c.snapshot()
    plan, _ = decide_round(snapshot, store.records(snapshot, {}), config=CONFIG, policy=Sia(CONFIG),
                           state={})  # fmt: skip
    return plan


@pytest.fixture
def observed_ledger():
    """A ledger after one job of each application on each type."""
    ledger = Ledger(":memory:")
    store, c = JobStore(ledger, CONFIG), cluster()
    for job_id, name, where in (
        (1, "typed", "g1"), (2, "typed", "g3"), (3, "even", "g1"), (4, "even", "g3")
    ):  # fmt: skip
        start(c, job_id, name, {where: 1})
    tell(store, c, 1, 2, 3, 4)
    return ledger


@pytest.mark.parametrize("a100", [2, 3])
def test_each_application_ends_on_the_type_that_suits_it(observed_ledger, a100):
    store, c = JobStore(observed_ledger, CONFIG), cluster(at=30.0, a100=a100)
    start(c, 2, "typed", {"g3": 1})
    start(c, 3, "even", {"g1": 1})
    tell(store, c, 2, 3)
    for _ in range(3):
        c.records.update(store.records(c.snapshot(), {}))
        c.carry_out(decided(store, c))
        c.time += 20.0
        tell(store, c, 2, 3)
    held = {j.name: j.allocation.gpu_type for j in c.jobs if j.submission}
    assert held == {"typed": "a100", "even": "v100"}
    plan = decided(store, c)
    assert not [d for d in plan.changes if d.target.gpu_type != d.current.gpu_type]
    assert "v100 would give" in words(plan.decision[2].reason)
    assert "a100 would give" in words(plan.decision[3].reason)


def test_without_earlier_jobs_the_configuration_is_believed():
    """Both are taken for twice as fast on an a100: nothing tells the applications apart."""
    store, c = JobStore(Ledger(":memory:"), CONFIG), cluster(at=30.0)
    start(c, 3, "even", {"g3": 1})
    tell(store, c, 3)
    (decision,) = decided(store, c).changes
    assert (decision.target.gpu_type, decision.target.gpus) == ("a100", 2)


def test_a_job_that_has_reported_nothing_is_left_to_its_speed(observed_ledger):
    store, c = JobStore(observed_ledger, CONFIG), cluster(at=30.0)
    start(c, 5, "never-seen", {"g1": 1})
    record = store.records(c.snapshot(), {})[5]
    assert record.not_in_place == Reason("in-place-unknown")
    known = {"last_change": record.last_change, "not_in_place": record.not_in_place}
    assert record == replace(JobRecord(job_id=5), **known)
    decided(store, c)


def test_an_elastic_batch_makes_more_gpus_worth_more():
    """Two equal jobs whose steps hardly get faster on more GPUs; one may take larger batches."""
    store, c = JobStore(Ledger(":memory:"), CONFIG), cluster(at=30.0, a100=3)
    store.learning.adaptive_batches = True
    for job_id, batch in ((2, ""), (3, ",batch=32-512")):
        c.add(job_id, elastic=f"1-2,types=a100{batch}", on={"g1": 1}, submit_time=NOW,
              start_time=NOW)  # fmt: skip
        c.jobs[-1] = replace(c.jobs[-1], name=f"net{job_id}", user="alice")
        micro_s = 0.1 + 0.1 * BATCH / 32
        report = replace(measured(c, job_id), step_time_s=micro_s, micro_step_s=micro_s,
                         grad_sqr=1.0, grad_var=50.0, max_micro_batch=64)  # fmt: skip
        store.record_report(report, c.jobs[-1], c.time)
    c.records.update(store.records(c.snapshot(), {}))
    (decision,) = decided(store, c).changes
    assert (decision.job_id, decision.target.gpus) == (3, 2)
