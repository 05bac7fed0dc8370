"""Running jobs whose batch the controller tunes, for tests of batch tuning and of freezing."""

from slurm_elastic.config import schema
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.core.cluster import Allocation, JobState, Node, Snapshot
from slurm_elastic.core.report import Report
from tests.support.controller.job_records import job

PER_NODE = {"a100": 4, "v100": 4}
NODES = tuple(
    Node(name=name, gpu_type=kind, gpus=4)
    for name, kind in (("n1", "a100"), ("n2", "a100"), ("n3", "v100"))
)


def running(job_id=7, *, gpus=1, directive="1-8,batch=64-1024", **fields):
    return job(job_id=job_id, name="net", directive=directive, state=JobState.RUNNING, gpus=gpus,
               allocation=Allocation.of("a100", {"n1": gpus}), **fields)  # fmt: skip


def report(job_id=7, **fields):
    values = {"job_id": job_id, "run": 0, "phase": "training", "gpus": 1, "global_batch": 64,
              "step_time_s": 0.2, "steps_measured": 10, "micro_batch": 64, "accumulation": 0,
              "micro_step_s": 0.2, "initial_batch": 64}  # fmt: skip
    return Report(**({**values, "grad_sqr": 1.0, "grad_var": 100.0} | fields))


class TuningController:
    """Parts of a controller that tune the batches of running jobs; its ledger is in memory."""

    def __init__(self, *, tunes=True, policy="sia"):
        self.store = JobStore(
            Ledger(":memory:"), schema.parse(f'[controller]\npolicy = "{policy}"')
        )
        self.store.learning.adaptive_batches = tunes
        self.outbox, self.reports = OrderOutbox(), {}
        self.tuner = BatchTuner(self.outbox.tell)

    def hear(self, of, told):
        self.store.record_report(told, of, 0.0)
        self.reports[of.job_id] = told

    def records(self, *jobs):
        return self.store.records(Snapshot(time=1000.0, nodes=NODES, jobs=jobs), {})

    def round(self, *jobs, act=True, leave=()):
        jobs = tuple(self.store.with_allowed_directive(j) for j in jobs)
        snapshot = Snapshot(time=1000.0, nodes=NODES, jobs=jobs)
        return self.tuner.round(
            snapshot, self.store.records(snapshot, {}), self.reports, act=act, leave=leave
        )

    def batch(self, job_id=7, run=0):
        return self.outbox.orders(job_id, run).batch
