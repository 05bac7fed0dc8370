"""All policies on Sia's published workloads, one table: `python -m benchmarks.policies`.

The workloads of docs/data.md on the 64-GPU cluster of the paper's Table 3, a round a minute (gavel,
themis and shockwave: six). A row is a policy, with or without sharing between jobs of an
application, with or without the lengths that jobs state; each figure is the mean over the workloads
of a trace, beside it the difference to what Sia's artifact produced for the same files. CPU per
round is wall time of the policy's calls in this process.

A row "wrong lengths": every job states its length wrong by a factor of its own, drawn with a
standard deviation of logarithms of 0.5; its progress is 1 from where the stated length ends.

`--differ 0.4`: every job takes its own multiple of its application's step times, drawn with that
standard deviation of logarithms; what sharing is worth then.

`--drawn 3`: instead of the published workloads three of each trace that are drawn from their jobs
and hours (drawn_workloads.py). The artifact's figures are then those of policy `sia` with
`artifact_compat`, which reproduces it (docs/benchmarks-sia.md).

`--all` adds all other policies, as in docs/policies.md. `--traces`, `--workloads` and `--rows`
choose a part; progress goes to stderr, the table (Markdown,
as in docs/goodput-figures.md) to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawn_workloads import draw
from benchmarks.sia_tables import CLUSTER, available, reference
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
from slurm_elastic.simulator.results import Result, mean
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    MeasuredCurve,
    Profiles,
)
from slurm_elastic.simulator.workloads.workload import Workload
from tests.support import published_data

TRACES = ("philly", "saturn", "newtrace")

#: Number of each workload, and summary of its simulation.
Summaries = list[tuple[int, dict[str, Any]]]


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
    Row(
        label="goodput, sharing, lengths, charge 0",
        policy="goodput",
        goodput=GoodputSettings(charge=0.0),
    ),
    Row(
        label="goodput, sharing, lengths, charge 0.25",
        policy="goodput",
        goodput=GoodputSettings(charge=0.25),
    ),
    Row(
        label="goodput, sharing, lengths, charge 0.5",
        policy="goodput",
        goodput=GoodputSettings(charge=0.5),
    ),
    Row(
        label="goodput, sharing, lengths, longest jobs last",
        policy="goodput",
        goodput=GoodputSettings(least_weight=0.0, long_power=0.0),
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
_ARTIFACT = Row(label="Sia's artifact", policy="sia", sia=SiaSettings(artifact_compat=True))
#: Seconds of a round of policies whose publications have longer ones than a minute.
_ROUND_S = dict.fromkeys(("gavel", "themis", "shockwave"), 360.0)
#: Key of a summary, head of the column, digits; the artifact has those of `reference`.
FIGURES = (
    ("avg_jct_h", "avg JCT h", 3),
    ("p99_jct_mean_h", "p99 h", 2),
    ("gpu_h_per_job", "GPU h/job", 2),
    ("restarts_per_job", "restarts/job", 2),
    ("unfair_fraction", "rho > 1", 3),
    ("policy_ms_p50", "round ms p50", 1),
    ("cpu_s", "CPU s", 1),
)


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


def figures(
    row: Row,
    trace: str,
    runs: Sequence[tuple[int, dict[str, Any]]],
    references: Sequence[Mapping[str, Any] | None],
) -> dict[str, Any]:
    """Return a row of the table: means over workloads, and differences to the artifact's.

    Args:
        row: the policy.
        trace: name of the trace.
        runs: number of each workload, and summary of its simulation.
        references: the artifact's summary of each workload; None: there is none.
    """
    line: dict[str, Any] = {"trace": trace, "row": row.label, "workloads": [i for i, _ in runs]}
    for name, _, _ in FIGURES:
        line[name] = mean([float(totals[name]) for _, totals in runs])
        known = [r[name] for r in references if r is not None and name in r]
        if known and len(known) == len(runs):
            line[f"{name}_artifact"] = mean(known)
            line[f"{name}_difference"] = line[name] / mean(known) - 1
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as Markdown, the artifact's figures first in each trace."""
    heads = [head for _, head, _ in FIGURES]
    out = [f"| trace | policy | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for trace in dict.fromkeys(line["trace"] for line in lines):
        of_trace = [line for line in lines if line["trace"] == trace]
        name = f"{trace} {', '.join(map(str, of_trace[0]['workloads']))}"
        artifact = [
            f"{of_trace[0][f'{n}_artifact']:.{digits}f}" if f"{n}_artifact" in of_trace[0] else ""
            for n, _, digits in FIGURES
        ]
        if any(artifact):
            out.append(f"| {name} | *Sia's artifact* | {' | '.join(artifact)} |")
        for line in of_trace:
            cells = []
            for key, _, digits in FIGURES:
                cell = f"{line[key]:.{digits}f}"
                if key != "restarts_per_job" and f"{key}_difference" in line:
                    cell += f" ({line[f'{key}_difference']:+.1%})"
                cells.append(cell)
            out.append(f"| {name} | {line['row']} | {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    labels = ", ".join(row.label for row in (*ROWS, *OTHER_ROWS))
    parser.add_argument("--traces", nargs="+", default=list(TRACES), help=", ".join(TRACES))
    parser.add_argument("--workloads", nargs="+", type=int, help="only these numbers")
    parser.add_argument("--rows", nargs="+", help=f"only policies or rows of these names: {labels}")
    parser.add_argument("--all", action="store_true", help="all policies, not goodput and sia only")
    parser.add_argument("--differ", type=float, default=0.0, help="deviation between jobs")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N drawn workloads")
    parser.add_argument("--json", action="store_true")
    published_data.add_option(parser)
    options = parser.parse_args()
    folder = published_data.locate_or_exit(parser, options, "sia", "traces", "workloads")
    published_data.locate_optional(
        parser, options, "sia", "reference", without="the artifact's figures are left out"
    )
    chosen = set(options.rows or ())
    known = (*ROWS, *OTHER_ROWS) if options.all or chosen else ROWS
    rows = [r for r in known if not chosen or {r.label, r.policy} & chosen]
    if not rows:
        parser.error(f"--rows {' '.join(options.rows)}: no such row; known: {labels}")
    began, lines = time.perf_counter(), list[dict[str, Any]]()
    for trace in options.traces:
        published = available(folder, trace)
        known_numbers = range(1, options.drawn + 1) if options.drawn and published else published
        numbers = [i for i in known_numbers if not options.workloads or i in options.workloads]

        def simulated(row: Row, trace: str = trace, numbers: list[int] = numbers) -> Summaries:
            summaries = []
            for index in numbers:
                result = run(
                    row, trace, index, folder, differ=options.differ, drawn=bool(options.drawn)
                )
                summaries.append((index, result.summary()))
                print(
                    f"{time.perf_counter() - began:6.0f} s: {trace}-{index}, {row.label}:"
                    f" avg JCT {summaries[-1][1]['avg_jct_h']:.3f} h",
                    file=sys.stderr,
                    flush=True,
                )
            return summaries

        references: list[Mapping[str, Any] | None] = [None for _ in numbers]
        if options.drawn and not options.differ:
            references = [totals for _, totals in simulated(_ARTIFACT)]
        elif not options.differ:
            references = [reference(folder, "sia", trace, i) for i in numbers]
        lines += [figures(row, trace, simulated(row), references) for row in rows if numbers]
    print(json.dumps(lines, indent=1) if options.json else table(lines))


if __name__ == "__main__":
    main()
