"""Halves of GPUs as configurations of the program of policy `goodput`.

Where jobs may share GPUs (`Question.halves`), the program counts halves of GPUs: a whole GPU takes
two units of its type's capacity, half of one takes one. Whole GPUs take even numbers, and so are
capacities: an odd half leaves the other half of its GPU unused. The free half beside a job about
which the policy is not asked has a capacity of its own. The goodput on half of a GPU is that on
one, times the mean speed beside the jobs that it may meet there.

The answer names whole GPUs again. Of each pair the first job keeps its GPU, or starts on one; the
second one waits to join it (placement/sharing/gpu_sharing.py). Jobs on halves that find no partner
get none, and the program is solved again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.gpu_parts import HalfOptions
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.neighbours.pair_matching import PossiblePair, matched
from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, ProgramSolution
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, Ints, RoundArrays
from slurm_elastic.policies.sia.sia import stated_program

#: Most programs with halves that are solved before the round goes on without them.
_MOST_ATTEMPTS = 3

Solve = Callable[[AssignmentProgram], ProgramSolution]


@dataclass(eq=False, kw_only=True)
class HalfColumns:
    """Configurations of half a GPU in one round; H of them.

    Attributes:
        options: which jobs may share.
        arrays: of the round.
        kind: [H] index of the GPU type.
        joins: [H] whether the other half belongs to a job outside the question.
        whole: [H] column of one whole GPU of the type.
        cost: [J, H] like the program's.
        valid: [J, H] whether the job may have it.
        partner: of the last solution, by the row of a job that waits to join another one: the id
            of that one.
        divided: of the last solution, the rows of jobs that start, and which another one is to
            join.
        stated: the last program that was solved with halves, for answers; None: without.
    """

    options: HalfOptions
    arrays: RoundArrays
    kind: Ints
    joins: Bools
    whole: Ints
    cost: Floats
    valid: Bools
    partner: dict[int, int] = field(default_factory=dict)
    divided: set[int] = field(default_factory=set)
    stated: RoundProgram | None = None

    def solve(self, program: AssignmentProgram, solve: Solve) -> ProgramSolution:
        """Return the solution in whole GPUs; jobs that are to join another one have none."""
        valid = self.valid & (program.fixed < 0)[:, None]
        for _ in range(_MOST_ATTEMPTS):
            if not valid.any():
                break
            in_halves = self._in_halves(program, valid)
            solution = solve(in_halves)
            choice, alone = self._in_whole_gpus(solution.choice)
            if not alone:
                self.stated = self._in_parts(stated_program(self.arrays, in_halves, solution))
                return dataclasses.replace(solution, choice=choice)
            valid[alone] = False
        self.partner, self.divided, self.stated = {}, set(), None
        return solve(program)

    def _in_parts(self, whole: RoundProgram) -> RoundProgram:
        """Return a program in halves, with the names of its halves as well."""
        return dataclasses.replace(
            whole,
            types=(*whole.types, *(f"{name}, half free" for name in whole.types)),
            nodes=np.r_[whole.nodes, np.ones_like(self.kind)],
            parts=2,
        )

    def noted(self, row: int, proposal: Proposal, snapshot: Snapshot) -> Proposal:
        """Return the proposal of a row; it says whether the job is to share its GPU."""
        first, *others = proposal.alternatives
        if row in self.divided:
            first = dataclasses.replace(first, half=True)
        elif row in self.partner:
            other = snapshot.job[self.partner[row]]
            reason = Reason("half-given-first", job=other.display_id, user=other.user)
            first = dataclasses.replace(first, reason=reason)
        return dataclasses.replace(proposal, alternatives=(first, *others))

    def _in_halves(self, program: AssignmentProgram, valid: Bools) -> AssignmentProgram:
        """Return the program with capacities in halves of GPUs."""
        types = self.arrays.configurations.types
        joinable = [len(self.options.joinable.get(name, ())) for name in types]
        return dataclasses.replace(
            program,
            cost=np.concatenate([program.cost, self.cost], axis=1),
            valid=np.concatenate([program.valid, valid], axis=1),
            config_type=np.r_[program.config_type, self.kind + len(types) * self.joins],
            config_gpus=np.r_[2 * program.config_gpus, np.ones_like(self.kind)],
            capacity=np.r_[2 * program.capacity, np.array(joinable, dtype=np.int64)],
            limits=tuple(
                # Half of a GPU counts as a whole one: the job may get that when its partner ends.
                LimitRow(
                    jobs=limit.jobs,
                    use=np.concatenate([limit.use, limit.use[:, self.whole]], axis=1),
                    left=limit.left,
                )
                for limit in program.limits
            ),
        )

    def _in_whole_gpus(self, solved: Ints) -> tuple[Ints, list[int]]:
        """Return a choice in whole GPUs, and the rows of jobs on halves without a partner."""
        columns, jobs = self.arrays.configurations, self.arrays.candidates
        choice, alone = solved.copy(), set[int]()
        self.partner, self.divided = {}, set()
        row_of = {job.job.job_id: row for row, job in enumerate(jobs)}
        for half in range(len(self.kind)):
            rows = np.flatnonzero(solved == len(columns) + half).tolist()
            if not rows:
                continue
            gpu_type = columns.types[self.kind[half]]
            others = self.options.joinable[gpu_type] if self.joins[half] else None
            ids = [jobs[row].job.job_id for row in rows]
            alone |= set(rows)
            for pair in _pairs(self.options, gpu_type, ids, others):
                known = [row_of[job_id] for job_id in pair if job_id in row_of]
                # Of two running and waiting jobs the running one has the GPU.
                first, second = (
                    (None, known[0])
                    if self.joins[half]
                    else sorted(known, key=lambda row: (jobs[row].held is None, row))
                )
                alone -= {second}
                choice[second] = -1
                self.partner[second] = next(i for i in pair if row_of.get(i) != second)
                if first is not None:
                    alone -= {first}
                    held = int(self.arrays.held[first])
                    choice[first] = held if held >= 0 else self.whole[half]
                    if held < 0:
                        self.divided.add(first)
        return choice, sorted(alone)


def half_columns(
    options: HalfOptions,
    arrays: RoundArrays,
    cost_of: Callable[[Ints, Floats], Floats],
    excluded: Bools,
) -> HalfColumns | None:
    """Return the configurations of half a GPU; None: no job may have one.

    Args:
        options: which jobs may share.
        arrays: of the round.
        cost_of: the costs [J, H] of columns [H] at these speeds [J, H].
        excluded: [J] jobs that get no halves.
    """
    columns = arrays.configurations
    ids = [job.job.job_id for job in arrays.candidates]
    kinds, joins, whole, speeds = [], [], [], []
    for column in np.flatnonzero((columns.gpus == 1) & (columns.nodes == 1)).tolist():
        gpu_type = columns.types[columns.kind[column]]
        waiting = {job for job, types in options.guests.items() if gpu_type in types}
        running = {job for job, held in options.hosts.items() if held == gpu_type}
        allowed = arrays.valid[:, column] & ~excluded
        for users, others, is_joining in (
            (waiting | running, waiting | running, False),
            (waiting, options.joinable.get(gpu_type, ()), True),
        ):
            speed = np.array(
                [
                    options.speed(gpu_type, job_id, others) if may and job_id in users else 0.0
                    for job_id, may in zip(ids, allowed.tolist(), strict=True)
                ]
            )
            if speed.any():
                kinds.append(columns.kind[column])
                joins.append(is_joining)
                whole.append(column)
                speeds.append(speed)
    if not kinds:
        return None
    table = np.stack(speeds, axis=1)
    at = np.array(whole, dtype=np.int64)
    return HalfColumns(
        options=options,
        arrays=arrays,
        kind=np.array(kinds, dtype=np.int64),
        joins=np.array(joins, dtype=bool),
        whole=at,
        cost=cost_of(at, table),
        valid=table > 0,
    )


def _pairs(
    options: HalfOptions, gpu_type: str, jobs: Iterable[int], others: Iterable[int] | None
) -> list[tuple[int, int]]:
    """Return as many pairs of jobs as possible, and of these those of most total speed.

    Args:
        options: which jobs may share.
        gpu_type: of the GPUs.
        jobs: ids.
        others: possible partners; None: the jobs themselves.
    """
    first = sorted(jobs)
    possible = []
    for job in first:
        for other in first if others is None else sorted(others):
            own = options.speeds.get((gpu_type, job, other))
            if own is None or (others is None and job > other):
                continue
            both = own, options.speeds[gpu_type, other, job]
            possible.append(
                PossiblePair(
                    first=job, second=other, speeds=both, surely=both, gates=both, caution=0.0
                )
            )
    return matched(possible, all_share=True)
