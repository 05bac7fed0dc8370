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
        single_gpu_steps: a step on one GPU, by type, data included.
    """

    name: str
    layers: int
    gradient_bytes: float
    batch: int
    single_gpu_steps: Mapping[str, StepTimes]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An extrapolated configuration.

    Attributes:
        fit: None on one GPU, where there are no stalls.
        stalls: observed ones that it is fitted to, one for each model.
        held_out: each of them as predicted by the others; empty if there are too few.
    """

    offer: ConfigurationCost
    fit: Fit | None
    stalls: tuple[ObservedStall, ...]
    held_out: tuple[PredictedStall, ...]

    @property
    def error(self) -> float:
        """Typical relative error of the stall; NaN: unknown."""
        return 0.0 if self.fit is None else rms_error(self.held_out)


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
    for field_name in ("layers", "gradient_bytes"):
        if getattr(subject, field_name) is None:
            raise ExtrapolationError(
                f"{subject.name}: {field_name} is missing in its profiles; add it to one of them"
            )
    assert subject.layers is not None
    assert subject.gradient_bytes is not None
    single_gpu_steps: dict[str, StepTimes] = {}
    rows = [r for r in merged(subject.name, subject.rows) if r.configuration.batch == batch]
    for row in sorted(rows, key=lambda r: (r.configuration.gpus, r.configuration)):
        if row.configuration.gpu_type not in single_gpu_steps:
            step = times(row.measured)
            single_gpu_steps[row.configuration.gpu_type] = replace(
                step, interconnect_s=0.0, network_s=0.0
            )
    return NewModel(
        name=subject.name,
        layers=subject.layers,
        gradient_bytes=subject.gradient_bytes,
        batch=batch,
        single_gpu_steps=single_gpu_steps,
    )


def estimates(
    unseen: NewModel, profiled_models: Iterable[MeasuredModel], *, but: Sequence[_Shape] = ()
) -> Estimates:
    """Return estimates for a model on all configurations of others.

    Args:
        unseen: the model.
        profiled_models: others; itself and those without layers or gradient bytes are skipped.
        but: configurations that need no estimate.
    """
    notes: list[str] = []
    reasons: dict[str, list[_Shape]] = {}
    by_shape: dict[_Shape, list[ObservedStall]] = {}
    for subject in profiled_models:
        if subject.name == unseen.name:
            continue
        if subject.layers is None or subject.gradient_bytes is None:
            notes.append(f"{subject.name} is not used: its layers or gradient bytes are unknown")
            continue
        for shape, stall in _nearest_stalls(subject, unseen.batch):
            by_shape.setdefault(shape, []).append(stall)
    extrapolated = []
    for shape in sorted(set(by_shape) - set(but)):
        stalls, gpu_type = by_shape[shape], shape[0]
        if gpu_type not in unseen.single_gpu_steps:
            reasons.setdefault(
                f"the computing time of a step on one {gpu_type or 'GPU'} is unknown", []
            ).append(shape)
            continue
        try:
            extrapolated.append(_estimate(unseen, shape, stalls))
        except ExtrapolationError as error:
            reasons.setdefault(str(error), []).append(shape)
    if not set(by_shape) - set(but):
        notes.append("nothing to extrapolate: no other model was profiled anywhere else")
    notes += _range_notes(unseen, [k for e in extrapolated for k in e.stalls])
    left_out = [f"{_shapes(shapes, unseen.batch)}: {why}" for why, shapes in reasons.items()]
    return Estimates(tuple(extrapolated), tuple(left_out), tuple(notes))


def _estimate(unseen: NewModel, shape: _Shape, stalls: Sequence[ObservedStall]) -> Estimate:
    configuration, single_gpu_step = (
        Configuration(*shape, unseen.batch),
        unseen.single_gpu_steps[shape[0]],
    )
    if configuration.gpus == 1:
        return Estimate(
            ConfigurationCost(configuration, single_gpu_step, estimated=True), None, (), ()
        )
    stall_fit = fit(stalls)
    held_out = leave_one_out(stalls)
    stall = stall_fit.stall_s(
        layers=unseen.layers,
        gradient_bytes=unseen.gradient_bytes,
        compute_s=single_gpu_step.compute_s,
    )
    stalled_part = {"network_s": stall} if configuration.nodes > 1 else {"interconnect_s": stall}
    spread_s = math.hypot(single_gpu_step.spread_s, rms_error(held_out) * stall)
    step = replace(single_gpu_step, **stalled_part, spread_s=spread_s)
    return Estimate(
        ConfigurationCost(configuration, step, estimated=True), stall_fit, tuple(stalls), held_out
    )


def _nearest_stalls(subject: MeasuredModel, batch: int) -> Iterable[tuple[_Shape, ObservedStall]]:
    """Yield one stall for each shape, of the batch nearest to the given one."""
    best: dict[_Shape, MeasuredConfiguration] = {}
    for row in merged(subject.name, subject.rows):
        shape = (row.configuration.gpu_type, row.configuration.nodes, row.configuration.gpus)
        nearest = best.get(shape)
        if row.measured.s is None:
            continue
        if nearest is None or _batch_distance(row, batch) < _batch_distance(nearest, batch):
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


def _batch_distance(row: MeasuredConfiguration, batch: int) -> float:
    return abs(math.log(row.configuration.batch / batch))


def _range_notes(unseen: NewModel, stalls: Sequence[ObservedStall]) -> list[str]:
    lines = []
    for field_name in ("layers", "gradient_bytes"):
        values = [getattr(k, field_name) for k in stalls]
        value = getattr(unseen, field_name)
        if values and not min(values) <= value <= max(values):
            lines.append(
                f"{field_name.replace('_', ' ')} {value:g} is outside of what was profiled,"
                f" {min(values):g} to {max(values):g}: the stated error says little about it"
            )
    return lines


def _shapes(shapes: Sequence[_Shape], batch: int) -> str:
    shown = ", ".join(str(Configuration(*s, batch)) for s in shapes[:3])
    return shown + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")
