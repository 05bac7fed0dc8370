"""Memory of a job's execution plans: what was reported, and plans that did not fit. Pure.

Our definition (docs/training-layouts.md, "Plans that need less memory"). The job's own choice does
not *fit* into an allocation if, in that plan,

- the program has run out of memory there,
- it needs as much memory as where it ran out of it on the same GPU type, or
- it needs `EXCESS` times the memory of the GPU.

Then another plan *stands in* for it: of those that need much less memory
(`models.execution.measured_memory`) the one that is expected to be fastest. After two more failures
in the allocation it is the one that needs least.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError
from slurm_elastic.core.execution.plan_gains import OversizedPlan
from slurm_elastic.core.execution.possible_plans import PlanCandidates
from slurm_elastic.core.report import Report
from slurm_elastic.models.execution.measured_memory import MeasuredMemory, slowdown

#: A plan is not tried if it is predicted to need this factor of a GPU's memory, or of the memory of
#: a plan that did not fit.
EXCESS = 1.1
#: Factors of a GPU's memory, and of the memory of a plan that did not fit: a plan that stands in
#: may need no more.
_ROOM, _LESS = 0.9, 0.7
#: Failures in one allocation after which only the plan that needs least is tried.
_FAILURES = 2
#: Bytes of optimizer state per byte of weights where they are not known: those of Adam.
_OPTIMIZER = 2.0
#: Allocations in which plans did not fit that are kept.
_MOST = 64

#: GPU type, GPUs, nodes.
AllocationShape: TypeAlias = tuple[str, int, int]


@dataclass(slots=True)
class PlanMemoryRecord:
    """Memory of one job's plans.

    Attributes:
        weights: bytes of all parameters; 0: not reported, and nothing can be predicted.
        optimizer: bytes of its whole state; None: not known yet.
        sample: bytes of one sample's activations; None: not measured yet.
        layers, micro_batch: as in `MeasuredMemory`.
        batch: samples of a step.
        gpu_bytes: memory of a GPU by type.
        failures: by allocation: plans that did not fit ("": the job's own choice), each with the
            samples of a step then, and the plan in full.
        stand_ins: plan in place of the job's own choice, by allocation; "": it fits.
    """

    weights: int = 0
    optimizer: int | None = None
    sample: float | None = None
    layers: int = 0
    micro_batch: int = 0
    batch: int = 0
    gpu_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[AllocationShape, dict[str, tuple[int, str]]] = field(default_factory=dict)
    stand_ins: dict[AllocationShape, str] = field(default_factory=dict)

    def record(self, report: Report, plan: ExecutionPlan | None, gpu_type: str) -> None:
        """Record a report.

        Args:
            report: of the present attempt.
            plan: the plan that it trains in; None: not known.
            gpu_type: of its GPUs.
        """
        self.weights = report.weight_bytes or self.weights
        self.layers = report.layers or self.layers
        self.batch = report.global_batch or self.batch
        self.micro_batch = report.max_micro_batch or self.micro_batch
        if report.optimizer_bytes is not None:
            self.optimizer = report.optimizer_bytes
        if report.gpu_bytes and gpu_type:
            self.gpu_bytes[gpu_type] = report.gpu_bytes
        if not report.peak_memory_bytes or not self.weights or not self.batch:
            return
        # What recomputation saves is not measured, but assumed.
        is_exact = not (report.plan and plan and plan.recompute)
        if plan and plan.space == 1 and (is_exact or self.sample is None):
            memory = self._memory(0.0)
            kept = memory.kept_samples(plan, batch=self.batch)
            self.sample = max(0.0, report.peak_memory_bytes - memory.state_bytes(plan)) / kept

    def _memory(self, sample: float) -> MeasuredMemory:
        optimizer = _OPTIMIZER * self.weights if self.optimizer is None else self.optimizer
        return MeasuredMemory(
            weights=self.weights,
            optimizer=optimizer,
            sample=sample,
            layers=self.layers,
            micro_batch=self.micro_batch,
        )

    def predicted(self, plan: ExecutionPlan, batch: int) -> float | None:
        """Return the bytes that a plan needs on the GPU that needs most; None: not known.

        As long as no peak was measured, a GPU's share of a step counts as much as the whole state.
        """
        if not self.weights or not batch or plan.space > 1:
            return None
        memory, sample = self._memory(0.0), self.sample
        if sample is None:
            whole = 2 * memory.weights + memory.optimizer
            sample = whole * plan.world / batch
        return self._memory(sample).gpu_bytes(plan, batch=batch)

    def fail(self, shape: AllocationShape, text: str, plan: ExecutionPlan) -> bool:
        """Record that a plan did not fit; return whether that is new.

        Args:
            shape: the allocation.
            text: of the plan; "": the job's own choice.
            plan: the same in full.
        """
        known = self.failures.pop(shape, {})
        is_new = text not in known or self.batch < known[text][0]
        self.failures[shape] = {**known, text: (self.batch, str(plan))} if is_new else known
        self.stand_ins.pop(shape, None)
        while len(self.failures) > _MOST:
            del self.failures[next(iter(self.failures))]
        return is_new

    def failed(self, shape: AllocationShape, text: str) -> bool:
        """Return whether a plan did not fit into an allocation, with no larger a batch."""
        failure = self.failures.get(shape, {}).get(text)
        return failure is not None and self.batch >= failure[0]

    def fits(self, shape: AllocationShape, text: str, plan: ExecutionPlan) -> bool:
        """Return whether a plan may fit into an allocation, as far as is known.

        Args:
            shape: the allocation.
            text: of the plan; "": the job's own choice.
            plan: the same in full.
        """
        if self.failed(shape, text):
            return False
        needed = self.predicted(plan, self.batch)
        if needed is None:
            return True
        gpu_bytes = self.gpu_bytes.get(shape[0])
        if gpu_bytes and needed > EXCESS * gpu_bytes:
            return False
        # The same plan with fewer samples on each GPU fits better, that of another kind perhaps.
        own = [b for b, is_own in self._too_much(shape[0]) if is_own and not text]
        every = [EXCESS * b for b, _ in self._too_much(shape[0])]
        return needed < min((*own, *every), default=needed + 1)

    def _too_much(self, gpu_type: str) -> list[tuple[float, bool]]:
        """Return the bytes of plans that did not fit on a type, and whether they were the own."""
        rows = []
        for (failed_type, _, _), failures in self.failures.items():
            for text, (batch, plan) in failures.items() if failed_type == gpu_type else ():
                needed = self.predicted(ExecutionPlan.parse(plan), batch)
                if needed is not None:
                    rows.append((needed, not text))
        return rows

    def stand_in(
        self, shape: AllocationShape, candidates: PlanCandidates, *, without: Collection[str] = ()
    ) -> str | None:
        """Return the plan in place of the job's own choice in an allocation.

        Args:
            shape: the allocation.
            candidates: plans for it.
            without: texts of plans that are not to be chosen.

        Returns:
            "": its own choice fits; None: no plan does.
        """
        known = self.stand_ins.get(shape)
        own_fits = self.fits(shape, "", candidates.own)
        if known and not own_fits and not self.failed(shape, known) and known not in without:
            return known
        if own_fits:
            self.stand_ins.pop(shape, None)
            return ""
        chosen = self._smaller(shape, candidates, without)
        if chosen is not None:
            self.stand_ins[shape] = chosen
        return chosen

    def _smaller(
        self, shape: AllocationShape, candidates: PlanCandidates, without: Collection[str]
    ) -> str | None:
        needed: dict[ExecutionPlan, float] = {}
        for plan in candidates.smaller(self.batch):
            excluded = str(plan) in without or self.failed(shape, str(plan))
            size = None if excluded else self.predicted(plan, self.batch)
            if size is not None:
                needed[plan] = size
        too_much = [b for b, _ in self._too_much(shape[0])]
        gpu_bytes = self.gpu_bytes.get(shape[0])
        room = [_LESS * b for b in too_much] + ([_ROOM * gpu_bytes] if gpu_bytes else [])
        if len(self.failures.get(shape, {})) <= _FAILURES:
            fitting = [p for p in needed if needed[p] <= min(room, default=0.0)]
            if fitting:
                return str(min(fitting, key=lambda p: (slowdown(p), needed[p], str(p))))
        least = min(needed, key=lambda p: (needed[p], slowdown(p), str(p)), default=None)
        if least is None or needed[least] >= min(too_much, default=needed[least] + 1):
            return None
        return str(least)

    def oversized(self) -> tuple[OversizedPlan, ...]:
        """Return the plans that did not fit, and where."""
        return tuple(
            OversizedPlan(*shape, text)
            for shape, failures in self.failures.items()
            for text in failures
        )

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "sample": self.sample,
            "layers": self.layers,
            "micro_batch": self.micro_batch,
            "batch": self.batch,
            "gpu_bytes": self.gpu_bytes,
            "failures": [
                [*shape, text, batch, plan]
                for shape, failures in self.failures.items()
                for text, (batch, plan) in failures.items()
            ],
            "stand_ins": [[*shape, text] for shape, text in self.stand_ins.items()],
        }

    @classmethod
    def from_body(cls, body: object) -> PlanMemoryRecord:
        """Return it from the ledger's JSON; nothing is known if it is missing or unreadable."""
        values: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        record = cls()
        with contextlib.suppress(TypeError, ValueError, AttributeError, ExecutionPlanError):
            read = cls()
            for name in ("weights", "layers", "micro_batch", "batch"):
                setattr(read, name, int(values.get(name, 0)))
            optimizer, sample = values.get("optimizer"), values.get("sample")
            read.optimizer = None if optimizer is None else int(optimizer)
            read.sample = None if sample is None else float(sample)
            read.gpu_bytes = {str(t): int(b) for t, b in values.get("gpu_bytes", {}).items()}
            for gpu_type, gpus, nodes, text, batch, plan in _rows(values.get("failures")):
                shape = str(gpu_type), int(gpus), int(nodes)
                ExecutionPlan.parse(plan)
                failures = read.failures.setdefault(shape, {})
                failures[str(text)] = (int(batch), plan)
            for gpu_type, gpus, nodes, text in _rows(values.get("stand_ins")):
                ExecutionPlan.parse(text)
                read.stand_ins[str(gpu_type), int(gpus), int(nodes)] = text
            record = read
        return record


def _rows(value: object) -> Iterable[Any]:
    return value if isinstance(value, list) else ()
