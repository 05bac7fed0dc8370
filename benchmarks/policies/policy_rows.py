"""The policies that `benchmarks.policies` compares, and one simulation of each."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.policies.drawn_workloads import draw
from benchmarks.sia_tables import CLUSTER, available
from slurm_elastic.config.policy_settings import GoodputSettings, SiaSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import JobClass
from slurm_elastic.policies.policy_protocol import (
    Policy,
    Proposal,
    Question,
    capabilities_of,
    load,
)
from slurm_elastic.simulator.results import Result
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    MeasuredCurve,
    Profiles,
)
from slurm_elastic.simulator.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy and its settings.

    Attributes:
        job_class: class of all jobs; None: their batches may change.
        length_error: standard deviation of the logarithm of stated over true lengths.
        silent: no job reports its progress.
    """

    label: str
    policy: str
    job_class: JobClass | None = None
    goodput: GoodputSettings = dataclasses.field(default_factory=GoodputSettings)
    sia: SiaSettings = dataclasses.field(default_factory=SiaSettings)
    length_error: float = 0.0
    silent: bool = False

    @property
    def config(self) -> Config:
        """Configuration of its simulations."""
        return Config(
            controller=ControllerSettings(policy=self.policy, queue="controller"),
            goodput=self.goodput,
            sia=self.sia,
        )


#: Settings of `goodput` with the information that Sia's artifact has.
_ALONE = {"share": False, "growth": 2.0}
ROWS = (
    Row(label="goodput, sharing, lengths", policy="goodput"),
    Row(
        label="goodput, sharing",
        policy="goodput",
        goodput=GoodputSettings(lengths=False),
    ),
    Row(label="goodput, sharing, wrong lengths", policy="goodput", length_error=0.5),
    Row(
        label="goodput, sharing, predicted lengths",
        policy="goodput",
        goodput=GoodputSettings(predicted=True),
        silent=True,
    ),
    *(
        Row(label=f"goodput, sharing, lengths, {change}", policy="goodput", goodput=settings)
        for change, settings in (
            ("charge 0", GoodputSettings(charge=0.0)),
            ("charge 0.25", GoodputSettings(charge=0.25)),
            ("charge 0.5", GoodputSettings(charge=0.5)),
            ("no residuals", GoodputSettings(residuals=False)),
            ("hysteresis 0", GoodputSettings(hysteresis=0.0)),
        )
    ),
    Row(
        label="goodput, lengths",
        policy="goodput",
        goodput=GoodputSettings(share=False),
    ),
    Row(
        label="goodput alone, lengths",
        policy="goodput",
        goodput=GoodputSettings(**_ALONE),  # type: ignore[arg-type]
    ),
    Row(
        label="goodput alone",
        policy="goodput",
        goodput=GoodputSettings(lengths=False, **_ALONE),  # type: ignore[arg-type]
    ),
    Row(
        label="goodput, plain sharing, lengths",
        policy="goodput",
        goodput=GoodputSettings(share=False),
        sia=SiaSettings(share=True),
    ),
    Row(label="sia, sharing", policy="sia", sia=SiaSettings(share=True)),
    Row(label="sia", policy="sia"),
)
#: The other policies: those that choose sizes, and those that start jobs at the sizes of the
#: workloads, whose batches do not change either, as in the published comparisons. Under `fair` and
#: `dally` batches do not change; so the first ones run such jobs, too.
OTHER_ROWS = (
    *(
        Row(label=f"{policy}, fixed batches", policy=policy, job_class=JobClass.STRONG_SCALING)
        for policy in ("goodput", "sia")
    ),
    *(
        Row(label=p, policy=p)
        for p in ("icefrog", "fair", "elastic_batch", "dally", "pollux", "ones")
    ),
    *(
        Row(label=f"{policy}, rigid jobs", policy=policy, job_class=JobClass.RIGID)
        for policy in ("srtf", "qssf", "las", "themis", "gavel", "shockwave", "static", "fifo")
    ),
)
#: The policy that stands for Sia's artifact on drawn workloads.
ARTIFACT = Row(label="Sia's artifact", policy="sia", sia=SiaSettings(artifact_compat=True))
#: Seconds of a round of policies whose publications have longer ones than a minute.
_ROUND_S = dict.fromkeys(("gavel", "themis", "shockwave"), 360.0)


def run(
    row: Row, trace: str, index: int, data: Path, *, differ: float = 0.0, drawn: bool = False
) -> Result:
    """Simulate one workload under one policy.

    Args:
        row: the policy.
        trace: name of its trace.
        index: number of the workload in it.
        data: folder of Sia's data.
        differ: standard deviation between jobs of an application.
        drawn: whether the workload is drawn from those of the trace, `index` the seed.
    """
    cluster = cluster_text.parse(CLUSTER)
    folder = data / "workloads" / trace
    if drawn:
        published = [workload.read(folder / f"workload-{i}.csv") for i in available(data, trace)]
        jobs = draw(trace, published, index)
    else:
        jobs = workload.read(folder / f"workload-{index}.csv")
    profiles: Profiles = application_profiles.read(
        data / "traces", jobs.applications, cluster.types
    )
    if differ:
        jobs, profiles = different_jobs(jobs, profiles, differ, seed=index)
    policy = load(row.config)
    if row.length_error:
        policy = WrongLengths(policy, row.length_error, seed=index)
    if row.silent:
        policy = WithoutProgress(policy)
    result = simulate(
        jobs,
        profiles,
        cluster,
        config=row.config,
        policy=policy,
        interval_s=_ROUND_S.get(row.policy, 60.0),
        job_class=row.job_class,
    )
    return dataclasses.replace(result, segments=())


class WrongLengths:
    """A policy whose jobs report their progress by a length that is wrong."""

    def __init__(self, policy: Policy, deviation: float, *, seed: int) -> None:
        self.capabilities = capabilities_of(policy)
        self._policy = policy
        self._deviation = deviation
        self._seed = seed

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Ask the policy about jobs with the progress that they state."""
        records = {
            job_id: dataclasses.replace(record, progress=self._stated(job_id, record.progress))
            for job_id, record in question.records.items()
        }
        return self._policy.decide(dataclasses.replace(question, records=records), state)

    def _stated(self, job_id: int, progress: float | None) -> float | None:
        if progress is None:
            return None
        rng = random.Random(f"{self._seed} {job_id}")
        return min(1.0, progress / math.exp(rng.gauss(0.0, self._deviation)))


class WithoutProgress:
    """A policy whose jobs report no progress."""

    def __init__(self, policy: Policy) -> None:
        self.capabilities = capabilities_of(policy)
        self._policy = policy

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Ask the policy about jobs without progress."""
        records = {
            job_id: dataclasses.replace(record, progress=None)
            for job_id, record in question.records.items()
        }
        return self._policy.decide(dataclasses.replace(question, records=records), state)


def different_jobs(
    jobs: Workload, profiles: Profiles, deviation: float, *, seed: int
) -> tuple[Workload, Profiles]:
    """Return the workload with a profile for each job, its step times multiplied by a factor."""
    rng = random.Random(seed)
    submitted, own = [], {}
    for job in jobs.jobs:
        name = f"{job.application}#{job.name}"
        own[name] = _slower(profiles[job.application], math.exp(rng.gauss(0.0, deviation)))
        submitted.append(dataclasses.replace(job, application=name))
    return Workload.of(jobs.name, submitted), own


def _slower(profile: ApplicationProfile, factor: float) -> ApplicationProfile:
    """Return a profile with all step and synchronisation times multiplied by a factor."""
    types = {}
    for name, of_type in profile.types.items():
        curves = {
            shape: MeasuredCurve(
                curve.micro_batches,
                tuple(factor * s for s in curve.step_s),
                tuple(factor * s for s in curve.sync_s),
            )
            for shape, curve in of_type.curves.items()
        }
        rows = tuple((*row[:3], *(factor * s for s in row[3:])) for row in of_type.scalability)
        types[name] = dataclasses.replace(of_type, curves=curves, scalability=rows)
    return dataclasses.replace(profile, types=types)
