"""Pipelines and sharded trainings under policies that learn: reports, model, table, decision.

A pipeline of two stages computes as GPipe's formula says, and reports as the training library
does; the controller's own store, models, policy and placement decide from these reports alone.
"""

import pytest

from slurm_elastic.config import schema
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.plan import Plan
from slurm_elastic.core.report import Report
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.icefrog.icefrog import IceFrog
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

TEXT = (
    '[controller]\npolicy = "{policy}"\n'
    "[resize]\nmin_interval_s = 2\nper_hour = 3600\nrestart_s = 1\n"
)
POLICIES = {"sia": Sia, "icefrog": IceFrog, "goodput": MarginalValue}
BATCH, STAGES, MICRO_BATCHES = 64, 2, 8
#: Seconds of one sample on one GPU, of each micro-batch more, and of an all-reduce.
SAMPLE_S, CALL_S, REDUCE_S = 0.01, 0.001, 0.02


def pipeline(gpus: int, *, stated: int | None = None, reduce_s: float = REDUCE_S) -> dict:
    """Return the report of a pipeline of two stages on so many GPUs.

    Args:
        gpus: of the job.
        stated: samples of a micro-batch by the script; None: the library's choice.
        reduce_s: of an all-reduce.
    """
    replicas = gpus // STAGES
    share = BATCH // replicas
    count = share // stated if stated else MICRO_BATCHES
    pass_s = (STAGES - 1 + count) * (share / count * SAMPLE_S / STAGES + CALL_S)
    step_s = pass_s + (reduce_s if replicas > 1 else 0.0)
    fields = {"layout": f"{replicas}x{STAGES}", "micro_batch": share, "accumulation": 0,
              "micro_batches": count, "step_time_s": step_s, "micro_step_s": pass_s,
              "forward_s": pass_s / 3, "backward_s": pass_s / 2, "sync_s": pass_s / 6}  # fmt: skip
    return fields | ({"max_micro_batch": stated} if stated else {})


def older(gpus: int) -> dict:
    """Return the report of a library that measures no pass of a pipeline."""
    fields = pipeline(gpus, stated=8)
    share = fields["micro_batch"]
    del fields["micro_step_s"], fields["micro_batches"]
    return fields | {"micro_batch": 8, "accumulation": share // 8 - 1}


def sharded(gpus: int) -> dict:
    """Return the report of a training with `shard=True`."""
    share = BATCH // gpus
    step_s = share * SAMPLE_S + CALL_S + (REDUCE_S if gpus > 1 else 0.0)
    return {"layout": f"{gpus}x1", "micro_batch": share, "accumulation": 0,
            "step_time_s": step_s, "micro_step_s": step_s - CALL_S}  # fmt: skip


def loop(gpus: int) -> dict:
    """Return the report of a loop of the script's own: whole steps only."""
    fields = sharded(gpus)
    del fields["micro_step_s"]
    return fields


PIPELINE, SHARDED = "2-8,unit=2,parallel=hybrid", "1-8"
KINDS = {
    "pipeline": (PIPELINE, pipeline),
    "pipeline-micro-batch": (PIPELINE, lambda gpus: pipeline(gpus, stated=8)),
    "pipeline-older-library": (PIPELINE, older),
    "stages-only": ("2-8,parallel=pipeline", lambda g: pipeline(g) | {"layout": f"1x{g}"}),
    "sharded": (SHARDED, sharded),
    "loop": (SHARDED, loop),
}


class Site:
    """Some nodes, a controller's store and its policy."""

    def __init__(self, policy: str = "sia", nodes: tuple[int, ...] = (4, 4)) -> None:
        self.config = schema.parse(TEXT.format(policy=policy))
        self.policy = POLICIES[policy](self.config)
        self.store = JobStore(Ledger(":memory:"), self.config)
        self.cluster = Cluster([node(f"g{i}", gpus) for i, gpus in enumerate(nodes, start=1)])
        self.state: dict = {}
        self.reports: dict = {}

    def start(self, job_id: int, directive: str, reports, on: dict[str, int]) -> None:
        """Start a job that reports in this way."""
        self.cluster.add(job_id, elastic=directive, on=on, submit_time=NOW, start_time=NOW)
        self.reports[job_id] = reports

    def held(self, job_id: int):
        job = next(j for j in self.cluster.jobs if j.job_id == job_id)
        return job.allocation

    def learned(self, job_id: int):
        return self.store.records(self.cluster.snapshot(), {})[job_id].learned

    def tell(self, times: int = 3) -> None:
        """Pass time, in which every running job reports."""
        for _ in range(times):
            self.cluster.time += 10.0
            for job in self.cluster.jobs:
                if job.job_id in self.reports and job.allocation:
                    gpus = job.allocation.gpus
                    values = {"global_batch": BATCH, "initial_batch": BATCH, "steps_measured": 20,
                              "proven": True, "gpus": gpus}  # fmt: skip
                    values |= self.reports[job.job_id](gpus)
                    report = Report(job_id=job.job_id, run=0, phase="training", **values)
                    self.store.record_report(report, job, self.cluster.time)
        self.store.observe(self.cluster.snapshot())

    def round(self) -> Plan:
        """Decide, and carry it out."""
        snapshot = self.cluster.snapshot()
        self.cluster.records.update(self.store.records(snapshot, {}))
        records = self.store.records(snapshot, {})
        plan, self.state = decide_round(
            snapshot, records, config=self.config, policy=self.policy, state=self.state
        )
        self.cluster.carry_out(plan)
        return plan

    def settle(self, job_id: int, rounds: int = 6) -> list[int]:
        """Return the sizes that a job passes through."""
        sizes = [self.held(job_id).gpus]
        for _ in range(rounds):
            self.tell()
            self.round()
            if self.held(job_id).gpus != sizes[-1]:
                sizes.append(self.held(job_id).gpus)
        return sizes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_of_any_layout_grows_from_min_and_gives_way(policy: str, kind: str) -> None:
    directive, reports = KINDS[kind]
    least = int(directive[0])
    site = Site(policy)
    site.start(2, directive, reports, {"g1": least})
    sizes = site.settle(2)
    doubled = [s for s in (1, 2, 4, 8) if s >= least]
    # Policy goodput need not measure a size before it goes beyond twice as much.
    assert sizes == ([least, 8] if policy == "goodput" else doubled)
    site.cluster.add(9, gpus=4, priority=10**6)
    sizes = site.settle(2, rounds=2)
    assert sizes == [8, 4]
    assert site.held(9).gpus == 4, "the job that waited has started"


@pytest.mark.parametrize("policy", POLICIES)
def test_two_jobs_of_different_layouts_share_what_there_is(policy: str) -> None:
    """The pipeline whose all-reduce eats what a second replica gains stays smaller."""
    site = Site(policy, nodes=(6,))
    site.start(2, PIPELINE, lambda gpus: pipeline(gpus, reduce_s=0.15), {"g1": 2})
    site.start(4, SHARDED, sharded, {"g1": 1})
    for _ in range(8):
        site.tell()
        site.round()
    assert (site.held(2).gpus, site.held(4).gpus) == (2, 4)


def test_a_replica_is_never_split() -> None:
    """Of 8 free GPUs 3 and 3 lie beside other jobs: replicas of two GPUs take 2 and 2 of them."""
    site = Site()
    site.cluster.add(91, on={"g1": 1})
    site.cluster.add(92, on={"g2": 1})
    site.start(2, PIPELINE, pipeline, {"g1": 2})
    site.settle(2)
    assert site.held(2).gpus == 4
    assert {gpus % STAGES for _, gpus in site.held(2).shares} == {0}


@pytest.mark.parametrize("stated", [None, 8])
def test_the_model_predicts_the_passes_of_a_pipeline(stated: int | None) -> None:
    site = Site()
    site.start(2, PIPELINE, lambda gpus: pipeline(gpus, stated=stated), {"g1": 2})
    site.tell()
    site.cluster.jobs.clear()
    site.start(2, PIPELINE, lambda gpus: pipeline(gpus, stated=stated), {"g1": 4})
    site.tell()
    learned = site.learned(2)
    assert learned.application.micro_batches == (4 if stated else 8)
    assert [o.micro_batch for o in learned.observations] == ([16, 8] if stated else [8, 4])
    model = GoodputModel.of(learned, per_node={"a100": 4})
    predicted = model.goodputs("a100", [1, 1, 2], [2, 4, 8])
    expected = [BATCH / pipeline(gpus, stated=stated)["step_time_s"] for gpus in (2, 4, 8)]
    assert predicted.tolist() == pytest.approx(expected, rel=0.12)
