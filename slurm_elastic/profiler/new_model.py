"""Step times of a model on configurations where only other models were profiled. Pure.

Its computing time must be known for each type of GPU; its stalls are extrapolated, for each
configuration on which three or more models were profiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.profiler.extrapolate import (
    ExtrapolationError,
    Fit,
    ObservedStall,
    PredictedStall,
    fit,
    leave_one_out,
    rms_error,
)
from slurm_elastic.profiler.profile_merge import MeasuredConfiguration, MeasuredModel, merged, times
from slurm_elastic.profiler.recommendation import Configuration, ConfigurationCost, StepTimes

#: Type, nodes, GPUs.
_Shape = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewModel:
    """Known values of the model.

    Attributes:
        layers: with parameters, counted as in the profiles.
        gradient_bytes: reduced each step.
        batch: samples per GPU.
        alone: a step on one GPU, by type, data included.
    """

    name: str
    layers: int
    gradient_bytes: float
    batch: int
    alone: Mapping[str, StepTimes]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An extrapolated configuration.

    Attributes:
        fit: None on one GPU, where there are no stalls.
        known: the models that it is fitted to.
        missed: each of them as predicted by the others; empty if there are too few.
    """

    offer: ConfigurationCost
    fit: Fit | None
    known: tuple[ObservedStall, ...]
    missed: tuple[PredictedStall, ...]

    @property
    def error(self) -> float:
        """Typical relative error of the stall; NaN: unknown."""
        return 0.0 if self.fit is None else rms_error(self.missed)


@dataclass(frozen=True, slots=True)
class Estimates:
    """All estimates, sorted by configuration, with lines about configurations without one."""

    estimates: tuple[Estimate, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def from_subject(subject: MeasuredModel, batch: int) -> NewModel:
    """Return a model that was profiled on a few configurations only, such as one GPU.

    Raises:
        ExtrapolationError: its layers or gradient bytes are unknown, or nothing was measured
            with this batch.
    """
    for what in ("layers", "gradient_bytes"):
        if getattr(subject, what) is None:
            raise ExtrapolationError(
                f"{subject.name}: {what} is missing in its profiles; add it to one of them"
            )
    assert subject.layers is not None
    assert subject.gradient_bytes is not None
    alone: dict[str, StepTimes] = {}
    rows = [r for r in merged(subject.name, subject.rows) if r.configuration.batch == batch]
    for row in sorted(rows, key=lambda r: (r.configuration.gpus, r.configuration)):
        if row.configuration.gpu_type not in alone:
            whole = times(row.measured)
            alone[row.configuration.gpu_type] = replace(whole, interconnect_s=0.0, network_s=0.0)
    return NewModel(
        name=subject.name,
        layers=subject.layers,
        gradient_bytes=subject.gradient_bytes,
        batch=batch,
        alone=alone,
    )


def estimates(
    unseen: NewModel, others: Iterable[MeasuredModel], *, but: Sequence[_Shape] = ()
) -> Estimates:
    """Return estimates for a model on all configurations of others.

    Args:
        unseen: the model.
        others: profiled models; itself and those without layers or gradient bytes are skipped.
        but: configurations that need no estimate.
    """
    notes: list[str] = []
    reasons: dict[str, list[_Shape]] = {}
    by_shape: dict[_Shape, list[ObservedStall]] = {}
    for subject in others:
        if subject.name == unseen.name:
            continue
        if subject.layers is None or subject.gradient_bytes is None:
            notes.append(f"{subject.name} is not used: its layers or gradient bytes are unknown")
            continue
        for shape, one in _known(subject, unseen.batch):
            by_shape.setdefault(shape, []).append(one)
    extrapolated = []
    for shape in sorted(set(by_shape) - set(but)):
        known, gpu_type = by_shape[shape], shape[0]
        if gpu_type not in unseen.alone:
            reasons.setdefault(
                f"the computing time of a step on one {gpu_type or 'GPU'} is unknown", []
            ).append(shape)
            continue
        try:
            extrapolated.append(_estimate(unseen, shape, known))
        except ExtrapolationError as error:
            reasons.setdefault(str(error), []).append(shape)
    if not set(by_shape) - set(but):
        notes.append("nothing to extrapolate: no other model was profiled anywhere else")
    notes += _outside(unseen, [k for e in extrapolated for k in e.known])
    left_out = [f"{_shapes(shapes, unseen.batch)}: {why}" for why, shapes in reasons.items()]
    return Estimates(tuple(extrapolated), tuple(left_out), tuple(notes))


def _estimate(unseen: NewModel, shape: _Shape, known: Sequence[ObservedStall]) -> Estimate:
    place, alone = Configuration(*shape, unseen.batch), unseen.alone[shape[0]]
    if place.gpus == 1:
        return Estimate(ConfigurationCost(place, alone, estimated=True), None, (), ())
    stall_fit = fit(known)
    missed = leave_one_out(known)
    stall = stall_fit.stall_s(
        layers=unseen.layers, gradient_bytes=unseen.gradient_bytes, compute_s=alone.compute_s
    )
    over = {"network_s": stall} if place.nodes > 1 else {"interconnect_s": stall}
    doubt = math.hypot(alone.spread_s, rms_error(missed) * stall)
    step = replace(alone, **over, spread_s=doubt)
    return Estimate(ConfigurationCost(place, step, estimated=True), stall_fit, tuple(known), missed)


def _known(subject: MeasuredModel, batch: int) -> Iterable[tuple[_Shape, ObservedStall]]:
    """Yield one stall for each shape, of the batch nearest to the given one."""
    best: dict[_Shape, MeasuredConfiguration] = {}
    for row in merged(subject.name, subject.rows):
        shape = (row.configuration.gpu_type, row.configuration.nodes, row.configuration.gpus)
        before = best.get(shape)
        if row.measured.s is None:
            continue
        if before is None or _apart(row, batch) < _apart(before, batch):
            best[shape] = row
    for shape, row in best.items():
        step = times(row.measured)
        assert subject.layers is not None
        assert subject.gradient_bytes is not None
        yield (
            shape,
            ObservedStall(
                model=subject.name,
                layers=subject.layers,
                gradient_bytes=subject.gradient_bytes,
                stall_s=step.interconnect_s + step.network_s,
                compute_s=step.compute_s,
            ),
        )


def _apart(row: MeasuredConfiguration, batch: int) -> float:
    return abs(math.log(row.configuration.batch / batch))


def _outside(unseen: NewModel, known: Sequence[ObservedStall]) -> list[str]:
    lines = []
    for what in ("layers", "gradient_bytes"):
        values = [getattr(k, what) for k in known]
        value = getattr(unseen, what)
        if values and not min(values) <= value <= max(values):
            lines.append(
                f"{what.replace('_', ' ')} {value:g} is outside of what was profiled,"
                f" {min(values):g} to {max(values):g}: the stated error says little about it"
            )
    return lines


def _shapes(shapes: Sequence[_Shape], batch: int) -> str:
    shown = ", ".join(str(Configuration(*s, batch)) for s in shapes[:3])
    return shown + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
