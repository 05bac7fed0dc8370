"""The directive: ``--elastic=MIN-MAX[,key=value…]``, counted in GPUs.

    >>> directive = Directive.parse("2-16,types=a100:v100,unit=a100:2/v100:8")
    >>> directive.min_gpus, directive.max_gpus, directive.types
    (2, 16, ('a100', 'v100'))
    >>> list(directive.sizes("v100")), directive.allows(6, "a100")
    ([8, 16], True)
    >>> Directive.parse("1-8,sizes=4:1:2").sizes("a100")
    (1, 2, 4)
    >>> str(Directive.parse("08-8,freeze=auto,parallel=data"))
    '8,freeze=auto'
    >>> Directive.parse("16-2")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    slurm_elastic...DirectiveError: --elastic=16-2: MIN 16 is larger than MAX 2; write 2-16

``plugins/lua/slurm_elastic_directive.lua`` checks the same grammar with the same words;
``tests/data/directives.toml`` holds the examples for both.
Code inside jobs imports this module: standard library only.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from slurm_elastic.core.directive_grammar import (
    DEFAULT_MAX_PENALTY,
    DirectiveError,
    Freeze,
    InPlace,
    Parallel,
    PlanChoice,
    Share,
    is_slice,
    percent,
    printed_range,
    read_fields,
    rounded,
)

__all__ = ["Directive", "DirectiveError"]


@dataclass(frozen=True, slots=True)
class Directive:
    """One checked directive; hashable and picklable.

    Attributes:
        min_gpus: Fewest GPUs the job may hold.
        max_gpus: Most GPUs the job may hold.
        types: GPU types in order of preference; empty means any.
        batch: Smallest and largest global batch; None keeps the script's own.
        parallel: How the model may be spread over GPUs.
        freeze: Whether converged layers may be frozen.
        max_penalty: The fraction of useful progress that freezing may cost.
        notice_s: Seconds the job needs to save its state; None means measure it.
        unit: GPUs per replica on every type; None if `units` gives it per type, or 1.
        units: (type, GPUs per replica) pairs; a type that is not named counts in single GPUs.
        listed: the numbers of GPUs that the job can run on, ascending; empty: all within MIN-MAX.
            MIN and MAX become the first and the last of them.
        in_place: Whether the job may be changed in place, without a requeue, where possible.
        plan: Whether the controller may choose the execution plan; "own": the job chooses it, or
            a user orders it.
        share: Whether the job may share its GPU with another job while it has one GPU.
        excluded: (type, GPUs) pairs that the job must not get, type "" for every type; see
            `excluding`. Not part of the text.
    """

    min_gpus: int
    max_gpus: int
    types: tuple[str, ...] = ()
    batch: tuple[int, int] | None = None
    parallel: Parallel = "data"
    freeze: Freeze = "off"
    max_penalty: float = DEFAULT_MAX_PENALTY
    notice_s: int | None = None
    unit: int | None = None
    units: tuple[tuple[str, int], ...] = ()
    listed: tuple[int, ...] = ()
    in_place: InPlace = "auto"
    plan: PlanChoice = "own"
    share: Share = "no"
    excluded: frozenset[tuple[str, int]] = frozenset()

    def __post_init__(self) -> None:
        if self.unit == 1:
            object.__setattr__(self, "unit", None)
        object.__setattr__(self, "max_penalty", rounded(self.max_penalty))
        object.__setattr__(self, "listed", tuple(sorted(self.listed)))
        text = str(self)
        try:
            read_fields(text)
            self._check_sizes()
            self._check_units()
            self._check_plan()
        except DirectiveError as error:
            raise DirectiveError(error.part, error.reason, text) from None

    @classmethod
    def parse(cls, text: str) -> "Directive":
        """Read a directive.

        Args:
            text: What stands behind ``--elastic=``.

        Raises:
            DirectiveError: The text does not follow the grammar.
        """
        try:
            return cls(**read_fields(text))  # type: ignore[arg-type]  # one dict for eleven types
        except DirectiveError as error:
            raise DirectiveError(error.part, error.reason, text) from None

    def __str__(self) -> str:
        """Return the canonical form: fixed order, no defaults.

        It parses to an equal directive, without what is excluded.
        """
        fields = [printed_range(self.min_gpus, self.max_gpus)]
        if self.types:
            fields.append("types=" + ":".join(self.types))
        if self.batch is not None:
            fields.append("batch=" + printed_range(*self.batch))
        if self.parallel != "data":
            fields.append("parallel=" + self.parallel)
        if self.freeze != "off":
            fields.append("freeze=" + self.freeze)
        if self.max_penalty != DEFAULT_MAX_PENALTY:
            fields.append("max-penalty=" + percent(self.max_penalty))
        if self.notice_s is not None:
            fields.append(f"notice={self.notice_s}")
        if self.unit is not None:
            fields.append(f"unit={self.unit}")
        elif self.units:
            fields.append("unit=" + "/".join(f"{name}:{count}" for name, count in self.units))
        if self.listed:
            fields.append("sizes=" + ":".join(map(str, self.listed)))
        words = (
            ("in-place", self.in_place, "auto"),
            ("plan", self.plan, "own"),
            ("share", self.share, "no"),
        )
        fields += [f"{key}={value}" for key, value, default in words if value != default]
        return ",".join(fields)

    def unit_for(self, gpu_type: str) -> int:
        """Return the GPUs per replica on this type."""
        return self.unit or dict(self.units).get(gpu_type, 1)

    def excluding(self, shapes: Iterable[tuple[str, int]]) -> "Directive":
        """Return the directive without these shapes, in addition to those excluded already.

        Args:
            shapes: (type, GPUs) pairs; type "" excludes this number of GPUs on every type.
        """
        excluded = self.excluded.union(shapes)
        return self if excluded == self.excluded else replace(self, excluded=excluded)

    def sizes(self, gpu_type: str) -> Sequence[int]:
        """Return the legal numbers of GPUs on this type, ascending; empty if it is not allowed.

        The result is hashable, and equal for equal sizes.
        """
        if not self._allows_type(gpu_type):
            return range(0)
        unit = self.unit_for(gpu_type)
        if not self.listed and not self.excluded:
            return range(_round_up(self.min_gpus, unit), self.max_gpus + 1, unit)
        barred = _barred(self.excluded, gpu_type)
        return _sizes_left((self.min_gpus, self.max_gpus), unit, self.listed, barred)

    @property
    def regular(self) -> bool:
        """Whether `sizes` are all multiples of the unit within MIN-MAX, on every type."""
        return not self.excluded and not self.listed

    def within(self, gpu_type: str, gpus: int, *, above: int) -> int:
        """Return the largest size of at most `gpus`, or the next one if none exceeds `above`.

        So a job whose growth is bounded does not stop in front of a size that it may not have.
        0 without a size.

        Args:
            gpu_type: the type.
            gpus: the bound.
            above: the size from which it grows, 0 for a start.
        """
        sizes = self.sizes(gpu_type)
        if not sizes:
            return 0
        bounded = bisect_right(sizes, gpus)
        larger = min(bisect_right(sizes, above), len(sizes) - 1)
        return sizes[max(bounded - 1, larger)]

    def allows(self, gpus: int, gpu_type: str) -> bool:
        """Return whether the job may run on this many GPUs of this type."""
        return (
            self.min_gpus <= gpus <= self.max_gpus
            and (not self.listed or gpus in self.listed)
            and gpus % self.unit_for(gpu_type) == 0
            and self._allows_type(gpu_type)
            and self.excluded.isdisjoint((("", gpus), (gpu_type, gpus)))
        )

    def _allows_type(self, gpu_type: str) -> bool:
        return gpu_type in self.types if self.types else not is_slice(gpu_type)

    def start(self) -> tuple[int, str | None]:
        """Return the GPUs and their type to request for a job that names no shape of its own.

        No type (None) if the smallest size that every allowed type shares exists, so that the
        preference does not delay the start; else the most preferred type's smallest size. What is
        excluded does not count: it is not known at submission.
        """
        submitted = replace(self, excluded=frozenset()) if self.excluded else self
        if len(self.types) == 1:
            return submitted.sizes(self.types[0])[0], self.types[0]
        names = self.types or tuple(name for name, _ in self.units)
        common = math.lcm(self.unit or 1, *(self.unit_for(name) for name in names))
        sizes = self.listed or range(_round_up(self.min_gpus, common), self.max_gpus + 1, common)
        shared = next((size for size in sizes if size % common == 0), None)
        if shared is not None:
            return shared, None
        return submitted.sizes(names[0])[0], names[0]

    def _check_sizes(self) -> None:
        """Check the listed sizes against MIN-MAX and narrow these to them."""
        for size in self.listed:
            if not self.min_gpus <= size <= self.max_gpus:
                span = printed_range(self.min_gpus, self.max_gpus)
                raise DirectiveError(
                    str(size), f"sizes: {size} is outside {span}; remove it or widen MIN-MAX"
                )
            if size % (self.unit or 1):
                raise DirectiveError(
                    str(size),
                    f"sizes: {size} is not a multiple of unit {self.unit};"
                    " remove it or change unit",
                )
        if self.listed:
            object.__setattr__(self, "min_gpus", self.listed[0])
            object.__setattr__(self, "max_gpus", self.listed[-1])

    def _check_units(self) -> None:
        if self.unit is not None:
            for label, gpus in (("MIN", self.min_gpus), ("MAX", self.max_gpus)):
                if gpus % self.unit:
                    raise DirectiveError(
                        f"unit={self.unit}",
                        f"{label} {gpus} is not a multiple of unit {self.unit};"
                        f" change {label} or unit",
                    )
        for name, count in self.units:
            part = f"{name}:{count}"
            if self.types and name not in self.types:
                raise DirectiveError(
                    part, f"unit: {name} is not in types; add it there or remove it here"
                )
            if self.listed and all(size % count for size in self.listed):
                listed = ":".join(map(str, self.listed))
                raise DirectiveError(
                    part,
                    f"unit {part}: no multiple of {count} is among sizes={listed};"
                    " add one or change unit",
                )
            if _round_up(self.min_gpus, count) > self.max_gpus:
                span = f"{self.min_gpus}-{self.max_gpus}"
                raise DirectiveError(
                    part,
                    f"unit {part}: no multiple of {count} lies within {span};"
                    " widen MIN-MAX or change unit",
                )

    def _check_plan(self) -> None:
        if self.plan == "auto" and self.parallel == "spatial":
            raise DirectiveError(
                "plan=auto",
                "plan=auto is not possible with parallel=spatial: spatial groups have no options;"
                " write plan=own or change parallel",
            )


@lru_cache(maxsize=4096)
def _barred(excluded: frozenset[tuple[str, int]], gpu_type: str) -> frozenset[int]:
    return frozenset(gpus for name, gpus in excluded if name in ("", gpu_type))


@lru_cache(maxsize=4096)
def _sizes_left(
    span: tuple[int, int], unit: int, listed: tuple[int, ...], barred: frozenset[int]
) -> tuple[int, ...]:
    """Return the multiples of a unit within a range, of those listed, that are not barred."""
    low, high = span
    sizes = listed or range(_round_up(low, unit), high + 1, unit)
    return tuple(s for s in sizes if low <= s <= high and s % unit == 0 and s not in barred)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
