"""Integer program of the round: `solve` and the same program in PuLP + CBC, paired in one run.

    python -m benchmarks.solver [--limit 120] [--seed 0] [--data DIR] [--skip-cbc] [--json]

CPU seconds of one core, model building and CBC's own process included. Instances have the
rows of an ordinary round of the published artifact (`hard_instance.json`, about 300 jobs on
2,048 GPUs of three types), drawn with replacement, each goodput times 1 +- 5 %; the three
capacities are in the same proportion. Without that file the rows are invented in the same
form. Parameters as published: p = -0.5, lambda_n = 1.1, relative gap 1e-4.
`gap` is `solve`'s distance to its own proven bound; `better` says how much of CBC's objective
`solve` saves (negative: CBC's is better).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp.assignment_milp import (
    AssignmentProgram,
    Bools,
    Floats,
    Ints,
    solve,
)
from slurm_elastic.policies.milp.pulp_backend import PulpBackend, SolverFailedError
from tests.support import published_data

SIZES = ((64, 30), (2048, 224), (2048, 2240), (16384, 10000))
NOT_RUNNING = 1.1
POWER = -0.5
GAP = 1e-4
#: GPUs by type in a node, and GPUs of each configuration, as in the artifact at 2,048 GPUs.
_CONFIGS = (
    ("aws", (1, 2, *range(4, 65, 4))),
    ("dgx-ext", (1, 2, 4, 8, 16)),
    ("rtx", (1, 2, 4, 8, 16, 24)),
)
_SHARES = (0.375, 0.25, 0.375)
#: Goodputs below are the artifact's filler for configurations that are not valid.
_FILLER = 2e-4


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows to draw from: goodput [J, C], restart factor [J], held configuration [J] or -1."""

    goodput: Floats
    factor: Floats
    held: Ints
    kinds: Ints
    gpus: Ints
    source: str


def published(path: Path) -> tuple[Rows, AssignmentProgram]:
    """Return the rows of `hard_instance.json`, and the program as the artifact stated it."""
    data = json.loads(path.read_text())
    names = list(dict.fromkeys(c[0] for c in data["configurations"]))
    jobs = {name: i for i, name in enumerate(data["jobs"])}
    rows = Rows(
        goodput=np.array(data["goodput"], dtype=np.float64),
        factor=np.array(data["restart_factor"], dtype=np.float64),
        held=np.array([-1 if c is None else c for c in data["previous"]], dtype=np.int64),
        kinds=np.array([names.index(c[0]) for c in data["configurations"]], dtype=np.int64),
        gpus=np.array([c[2] for c in data["configurations"]], dtype=np.int64),
        source=path.name,
    )
    fixed = np.full(len(jobs), -1, dtype=np.int64)
    for name in data["fixed"]:
        job = jobs[name] if isinstance(name, str) else int(name)
        fixed[job] = rows.held[job]
    cost = np.minimum(np.round(_cost(rows.goodput, rows.factor, rows.held), 2), 3000.0)
    valid = np.ones(cost.shape, dtype=np.bool_)
    capacity = np.array(data["gpus"], dtype=np.int64)
    return rows, _program(rows, cost, valid, capacity, fixed)


def invented(jobs: int, seed: int) -> Rows:
    """Return rows of the same form: saturating curves, some type preferences, some jobs running."""
    rng = np.random.default_rng(seed)
    kinds = np.repeat(np.arange(len(_CONFIGS)), [len(sizes) for _, sizes in _CONFIGS])
    gpus = np.concatenate([np.array(sizes) for _, sizes in _CONFIGS]).astype(np.int64)
    speed = np.exp(rng.normal([0.0, 1.2, 0.5], 0.4, size=(jobs, 3)))
    loss = rng.uniform(0.01, 0.3, size=(jobs, 3))
    most = 2 ** rng.integers(0, 7, size=(jobs, 3))
    goodput = speed[:, kinds] * gpus / (1 + loss[:, kinds] * (gpus - 1))
    valid = gpus <= most[:, kinds]
    goodput = goodput / np.where(valid, goodput, np.inf).min(axis=1)[:, None]
    held = np.array([rng.choice(np.flatnonzero(v)) for v in valid], dtype=np.int64)
    held[rng.random(jobs) < 0.2] = -1
    return Rows(
        goodput=np.where(valid, goodput, 1e-4),
        factor=rng.uniform(0.3, 1.0, size=jobs),
        held=held,
        kinds=kinds,
        gpus=gpus,
        source="invented",
    )


def instance(rows: Rows, *, gpus: int, jobs: int, seed: int) -> AssignmentProgram:
    """Return a program of this size with rows drawn from these."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(rows.goodput), size=jobs)
    goodput = rows.goodput[drawn] * rng.uniform(0.95, 1.05, size=(jobs, len(rows.gpus)))
    cost = _cost(goodput, rows.factor[drawn], rows.held[drawn])
    capacity = np.array([round(gpus * share) for share in _SHARES], dtype=np.int64)
    none_held = np.full(jobs, -1, dtype=np.int64)
    return _program(rows, cost, goodput > _FILLER, capacity, none_held)


def _cost(goodput: Floats, factor: Floats, held: Ints) -> Floats:
    """Return normalised goodput to the power p, changed configurations times the restart factor."""
    stays = np.arange(goodput.shape[1]) == held[:, None]
    return np.asarray(np.where(stays, goodput, goodput * factor[:, None]) ** POWER)


def _program(
    rows: Rows, cost: Floats, valid: Bools, capacity: Ints, fixed: NDArray[np.int64]
) -> AssignmentProgram:
    return AssignmentProgram(
        cost=cost,
        valid=valid,
        config_type=rows.kinds,
        config_gpus=rows.gpus,
        capacity=capacity,
        not_running=NOT_RUNNING,
        fixed=fixed,
    )


def measure(
    program: AssignmentProgram, *, limit_s: float, cbc: bool, repeat: int = 5
) -> dict[str, Any]:
    """Return figures of one instance; times in CPU seconds, ours the median of several."""
    times = []
    for _ in range(repeat):
        solution, seconds = timed(lambda: solve(program, gap=GAP))
        times.append(seconds)
    ours = sorted(times)[len(times) // 2]
    figures: dict[str, Any] = {
        "gpus": int(program.capacity.sum()),
        "jobs": len(program.cost),
        "solve_cpu_s": ours,
        "objective": solution.objective,
        "gap": solution.gap,
        "proven": solution.proven,
        "how": solution.how,
    }
    if not cbc:
        return figures
    choice, seconds = timed(lambda: _by_cbc(program, limit_s))
    figures |= {"cbc_cpu_s": seconds, "cbc_finished": choice is not None, "ratio": seconds / ours}
    if choice is not None:
        objective = program.objective(choice)
        figures |= {"cbc_objective": objective, "better": 1 - solution.objective / objective}
    return figures


def _by_cbc(program: AssignmentProgram, limit_s: float) -> Ints | None:
    try:
        return PulpBackend("CBC").choose(program, time_limit_s=limit_s, gap=GAP)
    except SolverFailedError:
        return None


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Return a call's result, and the CPU seconds of this process and of its children."""

    def cpu() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.process_time() + children.ru_utime + children.ru_stime

    begin = cpu()
    result = run()
    return result, cpu() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for CBC per instance")
    parser.add_argument("--seed", type=int, default=0)
    published_data.add_option(parser)
    parser.add_argument("--skip-cbc", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = published_data.locate_optional(
        parser, args, "sia", "hard_instance.json", without="rows are invented"
    )
    programs = {}
    if folder:
        rows, programs["hard instance"] = published(folder / "hard_instance.json")
    else:
        rows = invented(300, args.seed)
    for gpus, jobs in SIZES:
        programs[f"{gpus}, {jobs}"] = instance(rows, gpus=gpus, jobs=jobs, seed=args.seed)
    rows_shown = []
    for name, program in programs.items():
        row = {"instance": name, "rows": rows.source}
        row |= measure(program, limit_s=args.limit, cbc=not args.skip_cbc)
        rows_shown.append(row)
        if not args.json:
            print(_line(row), flush=True)
    if args.json:
        print(json.dumps(rows_shown, indent=2))


def _line(row: dict[str, Any]) -> str:
    text = f"{row['instance']:14} solve {row['solve_cpu_s']:7.4f} s"
    text += f"  objective {row['objective']:10.3f}  gap {row['gap']:.1e}  {row['how']}"
    if "ratio" in row:
        text += f"\n{'':14} CBC   {row['cbc_cpu_s']:7.4f} s  "
        if row["cbc_finished"]:
            text += f"objective {row['cbc_objective']:10.3f}  ours better by {row['better']:.1e}"
        else:
            text += "did not finish"
        text += f"  ratio {row['ratio']:.1f}{'' if row['cbc_finished'] else ' or more'}"
    return text


if __name__ == "__main__":
    main()
