"""Rubick's published policy (MLSys'25), rule by rule, with the special cases of its code.

`docs/rubick.md` has the rules and their faults. Followed are also: free GPUs that were
counted before the last job was placed are used to enlarge jobs; slopes when enlarging are those of
the last round's sizes; a large model without GPUs still counts on the nodes that it last held; the
nodes for a large model are taken from a heap that was never put in order.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.models.execution.plan_times import step_parts
from slurm_elastic.policies.execution.plan_options import PlanHolding
from slurm_elastic.simulator.execution.plan_simulation import PlanRun
from slurm_elastic.simulator.execution.rubick_models import (
    BERT_FORWARD_GAIN,
    SCHEDULED_MODELS,
    ScheduledModel,
)
from slurm_elastic.simulator.execution.step_table import StepTable

_NODES = 8
_NODE_GPUS = 8
#: Jobs older than this many seconds come last.
_OLD_S = 200_000
#: Large models on at least so many GPUs are taken off, until they were restarted that often, or
#: always while more than so many guaranteed jobs are active.
_LARGE_GPUS, _MOST_RESTARTS, _MANY_GUARANTEED = 32, 7, 12
#: Predicted speed times this counts as the promised one.
_TOLERANCE = 1.5
#: A further GPU must make a job this much faster.
_LEAST_GAIN = 1.01


@dataclass(frozen=True, slots=True)
class _Size:
    """Best plan on some GPUs: samples/s, GPUs without useless ones, and the plan."""

    speed: float
    gpus: int
    plan: ExecutionPlan | None


_NOTHING = _Size(-1.0, 0, None)


class PublishedRubick:
    """The published policy.

    Args:
        tables: step tables, from which a guaranteed job's promised speed is taken.
    """

    def __init__(self, tables: Mapping[str, StepTable]) -> None:
        self._tables = tables
        #: Nodes that each large model held last.
        self._last_nodes: dict[str, frozenset[int]] = {}

    def decide(
        self, now: float, runs: Sequence[PlanRun], decided: Mapping[str, PlanHolding]
    ) -> dict[str, PlanHolding]:
        """See `PlanPolicy`."""
        by_name = {run.job.name: run for run in runs}
        held = dict(decided)
        old = {name: holding.gpus for name, holding in held.items()}
        slopes = {name: self._slope(run, old.get(name), 1, now) for name, run in by_name.items()}
        ascending = sorted(slopes, key=slopes.__getitem__)
        guaranteed = [name for name in ascending if by_name[name].job.guaranteed]
        order = guaranteed + [name for name in ascending if not by_name[name].job.guaranteed]
        for name in order:
            if (
                _is_large(by_name[name])
                and name in held
                and held[name].gpus >= _LARGE_GPUS
                and (by_name[name].restarts < _MOST_RESTARTS or len(guaranteed) > _MANY_GUARANTEED)
            ):
                held[name] = PlanHolding()
        free = _free(held)
        for name in order:
            old.setdefault(name, 0)
            held.setdefault(name, PlanHolding())
            free = _free(held)
            self._schedule(by_name[name], free, held)
        for node in range(_NODES):
            self._enlarge(node, free[node], held=held, old=old, by_name=by_name, now=now)
        for name in ascending:
            if _is_large(by_name[name]):
                self._enlarge_large(by_name[name], held)
        return held

    def _schedule(self, run: PlanRun, free: list[int], held: dict[str, PlanHolding]) -> None:
        name = run.job.name
        if _is_large(run):
            for _, shapes in _model(run).shapes:
                if self._fit(run, shapes, free, held):
                    return
            return
        own = dict(held[name].nodes)
        for node in sorted(range(_NODES), key=lambda n: -free[n]):
            if own and node not in own:
                continue
            gpus = free[node] + own.get(node, 0)
            size = _sizes(run.job.model)[gpus]
            promised = run.job.guaranteed and _TOLERANCE * size.speed >= self._promised(run)
            if promised or (not run.job.guaranteed and gpus != own.get(node, 0)):
                held[name] = _on_node(held[name], node, size)
                return

    def _enlarge(
        self,
        node: int,
        free: int,
        *,
        held: dict[str, PlanHolding],
        old: Mapping[str, int],
        by_name: Mapping[str, PlanRun],
        now: float,
    ) -> None:
        """Give the free GPUs of a node to the jobs there that gain most."""
        here = [name for name, holding in held.items() if node in dict(holding.nodes)]
        here += [
            name
            for name, nodes in self._last_nodes.items()
            if node in nodes and name in by_name and name not in here
        ]
        changed: dict[str, _Size] = {}
        over = not here
        while free > 0 and not over:
            slopes = {name: self._slope(by_name[name], old[name], free, now) for name in here}
            ranked = sorted(slopes, key=slopes.__getitem__, reverse=True)
            small = [name for name in ranked if not _is_large(by_name[name])]
            over = not small or small[0] == ranked[-1]
            if small:
                name = small[0]
                size = _sizes(by_name[name].job.model)[min(old[name] + free, _NODE_GPUS)]
                changed[name] = size
                free -= size.gpus - old[name]
                over = over or size.gpus == old[name]
        for name, size in changed.items():
            held[name] = _on_node(held[name], node, _sizes(by_name[name].job.model)[size.gpus])

    def _enlarge_large(self, run: PlanRun, held: dict[str, PlanHolding]) -> None:
        name = run.job.name
        free = _free({other: holding for other, holding in held.items() if other != name})
        for gpus, shapes in sorted(_model(run).shapes, reverse=True):
            if held[name].gpus <= gpus and self._fit(run, shapes, free, held):
                return

    def _fit(
        self,
        run: PlanRun,
        shapes: Sequence[tuple[int, ...]],
        free: Sequence[int],
        held: dict[str, PlanHolding],
    ) -> bool:
        """Place a large model in the first of these shapes that fits."""
        for shape in shapes:
            nodes = _nodes_for(shape, free)
            if nodes:
                plan = None
                if shape in _model(run).offloads:
                    plan = ExecutionPlan(LayoutText((sum(shape),)), sharding=Sharding.OFFLOAD)
                held[run.job.name] = PlanHolding(nodes, plan)
                self._last_nodes[run.job.name] = frozenset(node for node, _ in nodes)
                return True
        return False

    def _slope(self, run: PlanRun, gpus: int | None, more: int, now: float) -> float:
        """Return the gain in speed per GPU; None: a job that no round has seen yet."""
        if now - run.job.submit_s > _OLD_S:
            return 1e9
        sizes = _sizes(run.job.model)
        here = 0.0 if gpus is None else (sizes[gpus] if gpus <= _NODE_GPUS else _NOTHING).speed
        there = sizes[min((gpus or 0) + more, _NODE_GPUS)].speed
        return abs(here - there) / _model(run).reference / more

    def _promised(self, run: PlanRun) -> float:
        table = self._tables[run.job.model]
        return _model(run).work.batch / table.step_s(run.job.plan, (run.job.gpus,))


def _model(run: PlanRun) -> ScheduledModel:
    return SCHEDULED_MODELS[run.job.model]


def _is_large(run: PlanRun) -> bool:
    return bool(_model(run).shapes)


@functools.cache
def _sizes(name: str) -> tuple[_Size, ...]:
    """Return the best plan on 0 to 8 GPUs of a node."""
    model = SCHEDULED_MODELS[name]
    sizes = [_NOTHING]
    for gpus in range(1, _NODE_GPUS + 1):
        size = _best(name, model, gpus)
        if gpus > 1 and sizes[-1].speed * _LEAST_GAIN >= size.speed:
            size = sizes[-1]
        sizes.append(size)
    return tuple(sizes)


def _best(name: str, model: ScheduledModel, gpus: int) -> _Size:
    best = _Size(-1.0, gpus, None)
    if model.work.batch % gpus:
        return best
    gain = BERT_FORWARD_GAIN.get(gpus, gpus) if name == "bert" else gpus
    for sharding, most in model.most_samples:
        if model.work.batch // gpus > most:
            continue
        plan = ExecutionPlan(LayoutText((gpus,)), sharding=sharding)
        parts = step_parts(
            plan,
            model.work,
            forward_ms=model.forward_ms / gain,
            coefficients=model.coefficients,
            links=model.links,
            inside=True,
        )
        speed = model.work.batch / parts.step_ms * 1000
        if speed > best.speed:
            best = _Size(speed, gpus, plan)
    return best


def _free(held: Mapping[str, PlanHolding]) -> list[int]:
    free = [_NODE_GPUS] * _NODES
    for holding in held.values():
        for node, gpus in holding.nodes:
            free[node] -= gpus
    return free


def _on_node(holding: PlanHolding, node: int, size: _Size) -> PlanHolding:
    others = tuple((n, gpus) for n, gpus in holding.nodes if n != node)
    return PlanHolding((*others, (node, size.gpus)), size.plan)


def _nodes_for(shape: Sequence[int], free: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return a node for each part of a placement, or () if there is none."""
    if max(free) < min(shape):
        return ()
    heap = [(gpus, node) for node, gpus in enumerate(free) if gpus > 0]
    left, nodes = list(shape), []
    while left and heap:
        gpus, node = heapq.heappop(heap)
        part = next((p for p in left if p <= gpus), None)
        if part is not None:
            left.remove(part)
            nodes.append((node, part))
    return () if left else tuple(nodes)
