"""CPU of a throughput fit and the objective that it reaches, by search.

    python -m benchmarks.controller.fits [--sets 200] [--seed 0] [--data DIR] [--json]

Searches: `plain` (scipy's L-BFGS-B from the published start with numeric gradients),
`published` (the same with our analytic gradient; what `artifact_compat` uses) and `ours`. They
run one after the other on each problem, nothing cached. Times are CPU milliseconds per fit,
ratios those to `published`; differences are of the objective, below 0 is better than it.

Problems: `random`, random truths measured with 3 % noise in 2 to 10 configurations; `philly`,
every fit of the four published workloads replayed under policy `sia` (docs/data.md).

With Sia's published profiles both searches are also asked what they were not
shown: fitted to two batches in each of the 2 to 5 smallest shapes, `same` is the mean
error of |log step time| at the other batches there, `next` in the next larger shape, `far` in
one at least eight times as large. `sure` is that of the models of policy `goodput`, with the part
of their errors that is within once and twice the deviation of models/model_uncertainty.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import sia_tables
from slurm_elastic.core.application import Observation
from slurm_elastic.models import fitting, model_uncertainty, step_residuals, throughput
from slurm_elastic.models.fitting import FitPoint
from slurm_elastic.models.optimiser import Bounds, minimize
from slurm_elastic.models.throughput import ThroughputParameters
from tests.support import published_data

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (2, 16), (3, 12), (4, 16))
NOISE = 0.03
#: Choices of shown batches per profile and number of shapes.
DRAWS = 3

Search = Callable[..., list[float]]
#: Measurements, and whether communication may hide behind computation.
Problem = tuple[list[FitPoint], bool]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.controller.fits", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    published_data.add_option(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    figures = measure("random", [(_points(rng), True) for _ in range(options.sets)])
    data = published_data.locate_optional(
        parser,
        options,
        "sia",
        "traces",
        "workloads",
        without="the published workloads and profiles are left out",
    )
    if data:
        figures |= measure("philly", _of_traces(data))
        figures |= held_out(data / "traces", seed=options.seed)
    if options.json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")


def measure(label: str, problems: Sequence[Problem]) -> dict[str, Any]:
    """Return all figures of these problems."""
    searches: dict[str, Search] = {
        "plain": _plain,
        "published": fitting.published,
        "ours": fitting.search,
    }
    seconds = {name: np.empty(len(problems)) for name in searches}
    values = {name: np.empty(len(problems)) for name in searches}
    for search in searches.values():
        search(problems[0][0], overlap=True)  # imports and first calls are not the fit's
    for index, (points, overlap) in enumerate(problems):
        for name, search in searches.items():
            begin = time.process_time()
            theta = search(points, overlap=overlap)
            seconds[name][index] = time.process_time() - begin
            values[name][index] = fitting.objective(points)(theta)[0]
    figures: dict[str, Any] = {
        "fits": len(problems),
        "points_mean": float(np.mean([len(points) for points, _ in problems])),
    }
    for name in searches:
        difference = values[name] - values["published"]
        figures[f"{name}_ms"] = float(seconds[name].mean() * 1e3)
        figures[f"{name}_ms_p95"] = float(np.quantile(seconds[name], 0.95) * 1e3)
        figures[f"{name}_time_ratio"] = float(seconds[name].sum() / seconds["published"].sum())
        figures[f"{name}_objective"] = float(values[name].mean())
        figures[f"{name}_worst_difference"] = float(difference.max())
        figures[f"{name}_higher_by_1e-3"] = int((difference > 1e-3).sum())
        figures[f"{name}_lower_by_1e-3"] = int((difference < -1e-3).sum())
    return {f"{label}_{name}": value for name, value in figures.items()}


def _of_traces(data: Path) -> list[Problem]:
    """Return each fit that the policy and the jobs of the workloads `philly` ask for, once."""
    problems: dict[tuple[tuple[Observation, ...], int, bool], None] = {}
    fit = throughput.fit

    def record(
        observations: Sequence[Observation], *, unit: int = 1, overlap: bool = True, **options: bool
    ) -> ThroughputParameters:
        problems[tuple(observations), unit, overlap] = None
        return fit(observations, unit=unit, overlap=overlap, **options)

    throughput.fit = record
    for index in sia_tables.available(data, "philly"):
        sia_tables.run(
            sia_tables.Run(label="", trace="philly", index=index, compat=False, data=data)
        )
    throughput.fit = fit
    return [
        ([_point(o, unit) for o in observations], overlap)
        for observations, unit, overlap in problems
    ]


def held_out(profiles: Path, *, seed: int) -> dict[str, float]:
    """Return mean errors at configurations that a fit was not shown, by search."""
    rng = random.Random(seed)
    errors: dict[str, list[float]] = {}
    sure: dict[str, list[tuple[float, float]]] = {}
    for path in sorted(profiles.glob("*/placements-*.csv")):
        rows = _measured(path)
        if (1, 1) not in rows:
            continue  # pipelines count in other units
        shapes = sorted(rows, key=lambda shape: (shape[1], shape[0]))
        for count in sorted([*range(2, min(len(shapes), 6))] * DRAWS):
            shown = [o for s in shapes[:count] for o in rng.sample(rows[s], min(2, len(rows[s])))]
            _add_deviations(sure, rows, shapes, count=count, shown=shown)
            for name, compat in (("published", True), ("ours", False)):
                model = throughput.fit(shown, compat=compat)
                for index, shape in enumerate(shapes[: count + 1]):
                    where = errors.setdefault(f"{name}_{'next' if index == count else 'same'}", [])
                    for o in rows[shape]:
                        if o not in shown:
                            predicted = float(model.step_time(o.nodes, o.gpus, o.micro_batch))
                            where.append(abs(math.log(predicted / o.step_s)))
    figures = {f"{name}_error": float(np.mean(found)) for name, found in sorted(errors.items())}
    for name, pairs in sorted(sure.items()):
        error, deviation = np.array(pairs).T
        figures[f"sure_{name}_error"] = float(error.mean())
        figures[f"sure_{name}_within_1"] = float((error <= deviation).mean())
        figures[f"sure_{name}_within_2"] = float((error <= 2 * deviation).mean())
    return figures


def _add_deviations(
    sure: dict[str, list[tuple[float, float]]],
    rows: dict[tuple[int, int], list[Observation]],
    shapes: Sequence[tuple[int, int]],
    *,
    count: int,
    shown: Sequence[Observation],
) -> None:
    """Add (error, deviation) of all that was not shown, by the distance of its shape."""
    model = step_residuals.corrected(shown)
    most = max(o.gpus for o in shown)
    for index, shape in enumerate(shapes):
        far = shape[1] >= 8 * most
        name = "same" if index < count else "next" if index == count else "far" if far else ""
        for o in rows[shape] if name else ():
            if o in shown:
                continue
            place = {"nodes": o.nodes, "replicas": o.gpus, "micro_batch": o.micro_batch}
            predicted = float(model.iteration_time(*place.values()))
            deviation = model_uncertainty.step_deviation(shown, **place)
            sure.setdefault(name, []).append((abs(math.log(predicted / o.step_s)), deviation))


def _measured(path: Path) -> dict[tuple[int, int], list[Observation]]:
    """Return a profile's even placements, by (nodes, GPUs)."""
    rows: dict[tuple[int, int], list[Observation]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            digits = row["placement"]
            if len(set(digits)) > 1:
                continue
            shape = len(digits), sum(map(int, digits))
            step = float(row["step_time"])
            micro = step - float(row["sync_time"])
            if micro > 0:
                m = int(row["local_bsz"])
                rows.setdefault(shape, []).append(Observation("gpu", *shape, m, step, micro))
    return rows


def _points(rng: np.random.Generator) -> list[FitPoint]:
    """Return measurements of one invented job on one GPU type."""
    inside = 10 ** rng.uniform(-3, 0)
    across = inside * 10 ** rng.uniform(0, 1)
    truth = ThroughputParameters(
        alpha_c=10 ** rng.uniform(-3, 0),
        beta_c=10 ** rng.uniform(-5, -1),
        alpha_n=across,
        beta_n=across * rng.uniform(0, 0.2),
        alpha_r=inside,
        beta_r=inside * rng.uniform(0, 0.2),
        gamma=rng.uniform(1, 6),
    )
    seen: dict[tuple[int, int, int], Observation] = {}
    for _ in range(int(rng.integers(2, 11))):
        nodes, replicas = SHAPES[int(rng.integers(len(SHAPES)))]
        m = int(2 ** rng.integers(2, 9))
        step, micro = np.exp(NOISE * rng.normal(size=2)) * [
            float(truth.step_time(nodes, replicas, m)),
            float(truth.accumulation_time(m)),
        ]
        key = (nodes, replicas, m)
        seen[key] = Observation("gpu", nodes, replicas, m, float(step), float(micro))
    return [_point(o) for o in seen.values()]


def _point(observation: Observation, unit: int = 1) -> FitPoint:
    o = observation
    return FitPoint.measured(
        nodes=o.nodes,
        replicas=o.gpus // unit,
        micro_batch=o.micro_batch,
        step_s=o.step_s,
        micro_step_s=o.micro_step_s,
    )


def _plain(points: list[FitPoint], *, overlap: bool) -> list[float]:
    """Return the theta of the objective as the formula reads, with numeric gradients."""
    link = np.array([p.link for p in points])
    extra = np.array([p.extra for p in points])
    m = np.array([p.micro_batch for p in points])
    log_compute = np.array([p.log_compute for p in points])
    log_step = np.array([p.log_step for p in points])

    def objective(theta: NDArray[np.float64]) -> float:
        ac, bc, an, bn, ar, br, gamma = theta
        compute = ac + bc * m
        network = np.where(link == 0, 1e-8, np.where(link == 1, ar + br * extra, an + bn * extra))
        step = (compute**gamma + network**gamma) ** (1 / gamma)
        return float(
            math.sqrt(np.mean((np.log(compute) - log_compute) ** 2))
            + math.sqrt(np.mean((np.log(step) - log_step) ** 2))
            + 1e-3 * (gamma - 1) ** 2
            + 1e-2 * ((bn / an) ** 2 + (br / ar) ** 2)
        )

    lower, upper = fitting.bounds(points, overlap=overlap)
    start, bounds = np.clip(fitting.PUBLISHED, lower, upper), Bounds(lower, upper)
    with np.errstate(all="ignore"):  # its steps may overflow the powers
        found = minimize(objective, start, method="L-BFGS-B", bounds=bounds, tol=1e-5)
    return list(astuple(ThroughputParameters(*found.x.tolist())))


if __name__ == "__main__":
    main()
