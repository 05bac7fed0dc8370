"""Shapes in which a job has worked, and those that it is not to get. Pure.

Our definition (docs/reliability-failed-changes.md). A *shape* is a GPU type and a number of GPUs.
A shape in which the job failed is *barred*, unless it is the last one that worked; so is one that
Slurm refuses for the second time (`slurm_refusals`). A program that ends by itself on more GPUs
than it has worked on, of the same type, does not fail because of the type: the number is barred on
all types.

Half of a GPU has the shape of a whole one. A failure there, or a refusal, says nothing about whole
GPUs: it bars halves only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.trials.barred_shapes import (
    BarredShape,
    Shape,
    allowing_only,
    excluding,
    fails_on_every_type,
    shape_of,
)
from slurm_elastic.controller.state.trials.slurm_refusals import (
    REFUSAL_S,
    is_temporary,
    sizes_refused_with,
)
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason

#: Shapes of each kind that are kept.
_MOST = 64


@dataclass(slots=True, kw_only=True)
class ShapeRecord:
    """Shapes of one job. Times are epoch seconds.

    Attributes:
        worked: shapes that worked, the latest last.
        last: allocation in which the newest checkpoint was completed.
        barred: shapes in which it failed, or which Slurm refused twice.
        refused: shapes that Slurm has refused once, the latest last.
        half: failure on half of a GPU, or refusal of one: it is not to get another; None: none.
    """

    worked: list[Shape] = field(default_factory=list)
    last: Allocation | None = None
    barred: list[BarredShape] = field(default_factory=list)
    refused: list[Shape] = field(default_factory=list)
    half: BarredShape | None = None

    @property
    def last_shape(self) -> Shape | None:
        """The last shape that worked; None: none is known."""
        return shape_of(self.last)

    @property
    def half_barred(self) -> Reason | None:
        """Reason why the job does not get half of a GPU; None: it may get one."""
        return self.half.reason if self.half else None

    @property
    def excluded(self) -> frozenset[Shape]:
        """Shapes in which the job failed, and which it does not get again."""
        return frozenset(b.shape for b in self.barred)

    @property
    def left_out(self) -> tuple[tuple[str, int, Reason], ...]:
        """Barred shapes (type, GPUs, reason); type "": this number of GPUs of any type."""
        return tuple(
            ("" if fails_on_every_type(b, self.worked) else b.gpu_type, b.gpus, b.reason)
            for b in self.barred
        )

    def record_work(self, held: Allocation) -> None:
        """Record that a checkpoint was completed on these GPUs."""
        shape = shape_of(held)
        if shape is None:
            return
        self.last = held.whole
        if held.half:
            self.half = None
        self.worked = [*(s for s in self.worked if s != shape), shape][-_MOST:]
        self.barred = [b for b in self.barred if b.shape != shape]
        self.refused = [s for s in self.refused if s != shape]

    def bar(self, shape: Shape, reason: Reason, now: float, *, half: bool = False) -> None:
        """Bar a shape, unless it is the last that worked; or half of a GPU."""
        if half:
            self.half = BarredShape(*shape, reason, now)
            return
        if shape == self.last_shape:
            return
        if not is_temporary(reason):
            self.worked = [s for s in self.worked if s != shape]
        others = [b for b in self.barred if b.shape != shape]
        self.barred = [*others, BarredShape(*shape, reason, now)][-_MOST:]

    def refuse(
        self,
        planned: Allocation,
        reason: Reason,
        *,
        now: float,
        old: Allocation | None = None,
        directive: Directive | None = None,
    ) -> None:
        """Record that Slurm cannot start the job in a shape as it was placed.

        Another placement of the shape may be possible: the second refusal bars it, and with it the
        sizes of `sizes_refused_with` that have not worked. Half of a GPU is barred by the first
        one: a job may run without it, and each attempt may have cost a restart.

        Args:
            planned: allocation that Slurm refused.
            reason: why.
            now: epoch seconds.
            old: allocation that the job had before; None: none.
            directive: sizes that it does not allow need no bar; None: it is not known.
        """
        shape = planned.gpu_type, planned.gpus
        if planned.half:
            self.bar(shape, reason, now, half=True)
            return
        if shape in self.refused:
            others = sizes_refused_with(planned, reason, old=old)
            for gpus in sorted({*others, planned.gpus}):
                is_other = gpus != planned.gpus
                if is_other and directive and not directive.allows(gpus, planned.gpu_type):
                    continue
                if not (is_other and (planned.gpu_type, gpus) in self.worked):
                    self.bar((planned.gpu_type, gpus), reason, now)
        self.refused = [*(s for s in self.refused if s != shape), shape][-_MOST:]

    def lapse(self, now: float) -> bool:
        """Allow the shapes again that Slurm refused long ago; return whether there are any.

        One refusal bars such a shape again.
        """

        def is_over(barred: BarredShape) -> bool:
            return is_temporary(barred.reason) and now - barred.time >= REFUSAL_S

        kept = [b for b in self.barred if not is_over(b)]
        lapsed, self.barred = len(kept) < len(self.barred), kept
        if self.half is not None and is_over(self.half):
            lapsed, self.half = True, None
        return lapsed

    def allow_again(self, shape: Shape | None, *, since: float, half: bool) -> None:
        """Remove the failures in a shape from a time on.

        Args:
            shape: it; None: no shape.
            since: that time.
            half: whether failures on half of a GPU are removed, too.
        """
        self.barred = [b for b in self.barred if b.shape != shape or b.time < since]
        if half and self.half is not None and self.half.time >= since:
            self.half = None

    def clear(self) -> None:
        """Allow all shapes again."""
        self.barred, self.refused, self.half = [], [], None

    def restricted(
        self, directive: Directive, types: Iterable[str], *, only_worked: bool
    ) -> Directive:
        """Return a directive without the shapes that the job is not to get now.

        Args:
            directive: to restrict.
            types: GPU types of the cluster.
            only_worked: whether all shapes that have not worked are left out, if any has worked.
        """
        allowed = tuple(s for s in self.worked if directive.allows(s[1], s[0]))
        excluded = frozenset((gpu_type, gpus) for gpu_type, gpus, _ in self.left_out)
        if only_worked and allowed:
            names = frozenset((*types, *(t for t, _ in allowed)))
            return allowing_only(directive, allowed, names, excluded)
        return excluding(directive, excluded) if excluded else directive

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {
            "worked": self.worked,
            "last": self.last.to_body() if self.last else None,
            "barred": [b.to_json() for b in self.barred],
            "refused": self.refused,
            "half": self.half.to_json() if self.half else None,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> ShapeRecord:
        """Return the record from the ledger's JSON; unknown fields are ignored.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is unreadable.
        """
        half = body.get("half")
        return cls(
            worked=[(str(t), int(g)) for t, g in body.get("worked", ())],
            last=Allocation.from_body(body.get("last")),
            barred=[BarredShape.from_json(row) for row in body.get("barred", ())],
            refused=[(str(t), int(g)) for t, g in body.get("refused", ())],
            half=BarredShape.from_json(half) if half else None,
        )
