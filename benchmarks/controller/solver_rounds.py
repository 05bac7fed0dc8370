"""The programs of all rounds of a workload, by HiGHS and by a solver behind PuLP.

    python -m benchmarks.controller.solver_rounds [philly/workload-1.csv ...] [--solver CBC]
        [--every N] [--policy sia|goodput] [--data DIR] [--json]

The policy is simulated on Sia's published workload; the program of every N-th round is solved
again by both, without a gap. `difference` is the largest of their objectives, `faults` the
programs for which the other solver gave no answer. CPU seconds count the solver's own process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.simulator import CLUSTER
from benchmarks.solver import timed
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.plan import Proposal
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.pulp_backend import PulpBackend, SolverFailedError
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from tests.support import published_data

DEFAULT = ("philly/workload-1.csv",)
POLICIES: Mapping[str, type[Sia]] = {"sia": Sia, "goodput": MarginalValue}


class _EnoughError(Exception):
    """Ends a simulation early."""


class _Recorder:
    """A policy, with the programs of its rounds."""

    def __init__(self, policy: Sia, *, every: int, until_s: float) -> None:
        self.capabilities = policy.capabilities
        self._policy = policy
        self._every, self._until_s, self._rounds = every, until_s, 0
        self.programs: list[AssignmentProgram] = []

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Decide as the policy, and keep the program."""
        if question.snapshot.time > self._until_s:
            raise _EnoughError
        last = self._policy.round_program
        answer = self._policy.decide(question, state)
        present = self._policy.round_program
        if present is not None and present is not last:
            if self._rounds % self._every == 0:
                self.programs.append(present.program)
            self._rounds += 1
        return answer


def recorded(
    path: Path,
    traces: Path,
    *,
    every: int = 1,
    until_s: float = math.inf,
    policy: str = "sia",
) -> list[AssignmentProgram]:
    """Return the programs of every n-th round of a workload, up to a simulated time."""
    cluster = cluster_text.parse(CLUSTER)
    config = Config(controller=ControllerSettings(queue="controller", policy=policy))
    recorder = _Recorder(POLICIES[policy](config), every=every, until_s=until_s)
    jobs = workload.read(path)
    profiles = application_profiles.read(traces, jobs.applications, cluster.types)
    with contextlib.suppress(_EnoughError):
        simulate(jobs, profiles, cluster, config=config, policy=recorder)
    return recorder.programs


def compare(programs: Sequence[AssignmentProgram], backend: PulpBackend) -> dict[str, Any]:
    """Return the figures of both solvers on the same programs."""
    largest, faults, cpu_s, other_cpu_s = 0.0, 0, 0.0, 0.0
    for program in programs:
        solution, seconds = timed(partial(solve, program, gap=0.0))
        cpu_s += seconds
        try:
            choice, seconds = timed(partial(backend.choose, program))
        except SolverFailedError:
            faults += 1
            continue
        other_cpu_s += seconds
        largest = max(largest, abs(solution.objective - program.objective(choice)))
    return {
        "programs": len(programs),
        "difference": largest,
        "faults": faults,
        "highs_cpu_s": cpu_s,
        "other_cpu_s": other_cpu_s,
    }


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller.solver_rounds")
    parser.add_argument("workloads", nargs="*", default=list(DEFAULT))
    parser.add_argument("--solver", default="CBC", help="name as in pulp:NAME")
    parser.add_argument("--policy", choices=POLICIES, default="sia")
    parser.add_argument("--every", type=int, default=1, help="every n-th round only")
    published_data.add_option(parser)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    folder = published_data.locate_or_exit(parser, args, "sia", "traces", "workloads")
    backend = PulpBackend(args.solver)
    rows = {
        name: compare(
            recorded(
                folder / "workloads" / name,
                folder / "traces",
                every=args.every,
                policy=args.policy,
            ),
            backend,
        )
        for name in args.workloads
    }
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    for name, row in rows.items():
        print(
            f"{name}: {row['programs']} programs, {args.solver} failed on {row['faults']};"
            f" objectives differ by at most {row['difference']:.1e};"
            f" CPU {row['highs_cpu_s']:.2f} s HiGHS, {row['other_cpu_s']:.2f} s {args.solver}"
        )


if __name__ == "__main__":
    main()
