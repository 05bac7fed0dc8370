"""Merging of profiles into configurations that can be compared. Pure.

One model is compared at one batch, either per GPU or of all GPUs together. A configuration that
is in several files counts once, with the mean over all repeats. Left out, each with a line that
says so: single measurements (their spread is unknown), other batches, and configurations with an
unknown stall that others know. Measurements that contradict each other are an error, as it is
unknown which is right.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.profiler.profile_file import MeasuredTime, ProfiledConfiguration, StepProfile
from slurm_elastic.profiler.recommendation import Configuration, ConfigurationCost, StepTimes

N = TypeVar("N", int, float)

#: Parts of a step besides computing, in the order of a report.
STALLS = ("interconnect", "network", "prep", "fetch")
#: Two means contradict each other beyond so many standard errors of their difference, ...
_ERRORS = 3.0
#: ... and only if they differ by this part of the step: the profiler takes a stall for none below
#: 2 % (`stalls.FLOOR`), so that two honest ones may be that far apart; ...
_ALIKE = 0.05
#: ... by this part where a spread is not known.
_ALIKE_ONCE = 0.1


class ComparisonError(InvalidInputError):
    """Profiles that cannot be compared; the message names the file or option and the remedy."""


@dataclass(frozen=True, slots=True)
class MeasuredConfiguration:
    """One configuration in one file; `source` is its name, for messages."""

    source: str
    measured: ProfiledConfiguration

    @property
    def configuration(self) -> Configuration:
        """GPUs, nodes and batch."""
        c = self.measured
        return Configuration(c.gpu_type, c.nodes, c.gpus, c.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """Measurements of one model; None: no file has the value."""

    name: str
    layers: int | None
    gradient_bytes: float | None
    samples: int | None
    rows: tuple[MeasuredConfiguration, ...]


@dataclass(frozen=True, slots=True)
class MergedProfiles:
    """Configurations that can be compared.

    Attributes:
        offers: sorted by configuration.
        batch: the common batch, as text.
        repeats: by configuration.
        unknown: stalls that no profile has measured, counted as 0.
        left_out: lines about configurations that were left out.
    """

    offers: tuple[ConfigurationCost, ...]
    batch: str = ""
    repeats: Mapping[Configuration, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def subjects(
    profiles: Sequence[tuple[str, StepProfile]], *, samples: int | None = None
) -> dict[str, MeasuredModel]:
    """Return models by name, in the order of the files.

    A model without a name has that of its application, else that of its file. Profiles of one name
    that state different layers or gradient bytes are of different models (a class `ResNet` may
    be any): they are named after their application, else their file.

    Args:
        profiles: with the names of their files.
        samples: per epoch, in place of those in the files.

    Raises:
        ComparisonError: two files state different samples of one model.
    """
    by_name: dict[str, list[tuple[str, StepProfile]]] = {}
    for source, profile in profiles:
        name = profile.model or profile.application or source
        by_name.setdefault(name, []).append((source, profile))
    return {
        name: MeasuredModel(
            name=name,
            layers=_first_value(p.layers for _, p in files),
            gradient_bytes=_first_value(p.gradient_bytes for _, p in files),
            samples=samples or _samples(name, files),
            rows=tuple(MeasuredConfiguration(s, c) for s, p in files for c in p.configurations),
        )
        for shared, alike in by_name.items()
        for name, files in _split_models(shared, alike).items()
    }


def comparable(
    subject: MeasuredModel,
    *,
    batch: int | None = None,
    global_batch: int | None = None,
    once: bool = False,
) -> MergedProfiles:
    """Return the offers of one model.

    Args:
        subject: the model.
        batch: compare configurations with this number of samples per GPU.
        global_batch: compare those with this number of samples on all GPUs together. With neither,
            the batch of either kind that most configurations have in common; of equally frequent
            ones that per GPU, then the smallest.
        once: include single measurements.

    Raises:
        ComparisonError: measurements contradict each other, or no configuration is left.
    """
    rows, left_out = list(subject.rows), []
    copies = _copies(rows)
    if copies:
        left_out.append(f"{', '.join(copies)}: a copy of measurements in another file")
    if not once:
        single = [r for r in rows if r.measured.repeats < 2]
        rows = [r for r in rows if r.measured.repeats >= 2]
        if single:
            left_out.append(
                f"{_row_list(single)}: measured once, so its spread is unknown; repeat it, or give"
                " --once"
            )
    if not rows:
        raise ComparisonError(f"{subject.name}: {left_out[0]}")
    configurations = merged(subject.name, rows)
    group = _group(configurations, batch, global_batch)
    in_group = [r for r in configurations if group.has(r.configuration)]
    if len(in_group) < len(configurations):
        other_sizes = sorted({group.of(r.configuration) for r in configurations} - {group.size})
        left_out.append(
            f"{len(configurations) - len(in_group)} of {len(configurations)} configurations, with"
            f" {', '.join(map(str, other_sizes))} instead of {group}; choose with --batch or"
            " --global-batch"
        )
    lacking = {r.configuration: list(_missing_stalls(r.measured, in_group)) for r in in_group}
    complete = [r for r in in_group if not lacking[r.configuration]]
    if not complete:
        raise ComparisonError(
            f"{subject.name}: no configuration has all stalls that others have; profile them with"
            " the same options"
        )
    left_out += [
        f"{r.configuration}: {' and '.join(lacking[r.configuration])} unknown, but known for others"
        for r in in_group
        if lacking[r.configuration]
    ]
    return MergedProfiles(
        offers=tuple(ConfigurationCost(r.configuration, times(r.measured)) for r in complete),
        batch=str(group),
        repeats={r.configuration: r.measured.repeats for r in complete},
        unknown=tuple(
            s for s in STALLS
            if all(getattr(r.measured, s) is None for r in in_group)
            and any(_is_possible(r.measured, s) for r in in_group)
        ),
        left_out=tuple(left_out),
    )  # fmt: skip


def merged(model: str, rows: Iterable[MeasuredConfiguration]) -> list[MeasuredConfiguration]:
    """Return one row for each configuration, sorted; copies of a row count once.

    Raises:
        ComparisonError: two contradict each other.
    """
    by_configuration: dict[Configuration, MeasuredConfiguration] = {}
    measurements: dict[Configuration, list[ProfiledConfiguration]] = {}
    for row in rows:
        earlier = by_configuration.get(row.configuration)
        if earlier is None:
            by_configuration[row.configuration] = row
        elif row.measured not in measurements[row.configuration]:
            by_configuration[row.configuration] = _combined(model, earlier, row)
        measurements.setdefault(row.configuration, []).append(row.measured)
    return [by_configuration[c] for c in sorted(by_configuration)]


def times(measured: ProfiledConfiguration) -> StepTimes:
    """Return the times of a step; unknown stalls count as 0."""
    parts = [t for _, t in _timed(measured)]
    warm_spreads = [t.spread for name, t in _timed(measured) if name != "fetch"]
    seconds = {f"{name}_s": t.seconds for name, t in _timed(measured)}
    return StepTimes(**seconds, spread_s=math.hypot(*warm_spreads) if parts else math.nan)


def _combined(
    model: str, first: MeasuredConfiguration, second: MeasuredConfiguration
) -> MeasuredConfiguration:
    """Return two measurements as one, over all repeats together."""
    n, m = first.measured.repeats, second.measured.repeats
    step = max(times(first.measured).warm_s, times(second.measured).warm_s)
    parts: dict[str, Any] = dict(_timed(second.measured)) | dict(_timed(first.measured))
    for name, a in _timed(first.measured):
        b = getattr(second.measured, name)
        if b is None:
            continue
        spread = math.hypot(a.spread, b.spread)
        allowed = _ALIKE_ONCE * step
        if not math.isnan(spread):
            allowed = max(_ERRORS * spread, _ALIKE * step)
        if abs(a.seconds - b.seconds) > allowed:
            raise ComparisonError(
                f"{first.source} and {second.source} contradict each other: {name} of {model} on"
                f" {first.configuration} takes {a.seconds * 1e3:.4g} ms a step in one and"
                f" {b.seconds * 1e3:.4g} ms in the other, a difference beyond their spread; leave"
                " out the wrong one, or measure again"
            )
        mean = (n * a.seconds + m * b.seconds) / (n + m)
        squares = sum(
            (k - 1) * k * (t.spread if k > 1 else 0.0) ** 2 + k * (t.seconds - mean) ** 2
            for t, k in ((a, n), (b, m))
        )
        parts[name] = MeasuredTime(mean, math.sqrt(squares / ((n + m - 1) * (n + m))))
    combined = dataclasses.replace(first.measured, repeats=n + m, **parts)
    return MeasuredConfiguration(first.source, combined)


def _timed(measured: ProfiledConfiguration) -> Iterator[tuple[str, MeasuredTime]]:
    for name in ("compute", *STALLS):
        timed = getattr(measured, name)
        if timed is not None:
            yield name, timed


def _copies(rows: Sequence[MeasuredConfiguration]) -> list[str]:
    """Return the files that repeat measurements of another file."""
    earlier: dict[Configuration, list[ProfiledConfiguration]] = {}
    files: dict[str, None] = {}
    for row in rows:
        if row.measured in earlier.get(row.configuration, []):
            files[row.source] = None
        earlier.setdefault(row.configuration, []).append(row.measured)
    return list(files)


def _split_models(
    name: str, files: Sequence[tuple[str, StepProfile]]
) -> dict[str, list[tuple[str, StepProfile]]]:
    """Return the files of one model, or of several if their sizes differ."""
    if all(
        len({getattr(p, what) for _, p in files} - {None}) < 2
        for what in ("layers", "gradient_bytes")
    ):
        return {name: list(files)}
    applications = [p.application for _, p in files]
    by_model: dict[str, list[tuple[str, StepProfile]]] = {}
    for source, profile in files:
        profiles = [p for _, p in files if p.application == profile.application]
        alike = len({(p.layers, p.gradient_bytes) for p in profiles}) == 1
        distinction = profile.application if alike and len({*applications}) > 1 else source
        by_model.setdefault(f"{name} of {distinction}", []).append((source, profile))
    return by_model


def _samples(model: str, files: Sequence[tuple[str, StepProfile]]) -> int | None:
    counts = [(source, p.samples) for source, p in files if p.samples is not None]
    for source, count in counts[1:]:
        if count != counts[0][1]:
            raise ComparisonError(
                f"{counts[0][0]} and {source} contradict each other: an epoch of {model} has"
                f" {counts[0][1]} samples in one and {count} in the other; give --samples"
            )
    return counts[0][1] if counts else None


def _first_value(values: Iterable[N | None]) -> N | None:
    return next((v for v in values if v is not None), None)


@dataclass(frozen=True, slots=True)
class _Group:
    """Configurations of one batch, per GPU or of all together."""

    size: int
    together: bool

    def of(self, place: Configuration) -> int:
        return place.batch * place.gpus if self.together else place.batch

    def has(self, place: Configuration) -> bool:
        return self.of(place) == self.size

    def __str__(self) -> str:
        return f"{self.size} samples per {'step' if self.together else 'GPU'}"


def _group(
    rows: Sequence[MeasuredConfiguration], batch: int | None, global_batch: int | None
) -> _Group:
    counts = Counter(_Group(r.configuration.batch, together=False) for r in rows)
    counts.update(_Group(r.configuration.batch * r.configuration.gpus, together=True) for r in rows)
    for size, together, option in (
        (batch, False, "--batch"),
        (global_batch, True, "--global-batch"),
    ):
        if size is not None:
            group = _Group(size, together)
            if group not in counts:
                known_sizes = sorted(g.size for g in counts if g.together == together)
                raise ComparisonError(
                    f"{option}: nothing was measured with {group}; known:"
                    f" {', '.join(map(str, known_sizes))}"
                )
            return group
    return min(counts, key=lambda g: (-counts[g], g.together, g.size))


def _missing_stalls(
    measured: ProfiledConfiguration, group_rows: Sequence[MeasuredConfiguration]
) -> Iterator[str]:
    """Yield the stalls that are unknown here, but possible, and known for other configurations."""
    for stall in STALLS:
        elsewhere = any(getattr(o.measured, stall) is not None for o in group_rows)
        if getattr(measured, stall) is None and _is_possible(measured, stall) and elsewhere:
            yield stall


def _is_possible(measured: ProfiledConfiguration, stall: str) -> bool:
    if stall == "interconnect":
        # Over several nodes the network's stall may include it, if they were not separated.
        return measured.gpus > measured.nodes and (measured.nodes == 1 or measured.network is None)
    return stall != "network" or measured.nodes > 1


def _row_list(rows: Sequence[MeasuredConfiguration]) -> str:
    shown = ", ".join(f"{r.configuration} ({r.source})" for r in rows[:3])
    return shown + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")
