"""The directive: ``--elastic=MIN-MAX[,key=value…]``, counted in GPUs.

    >>> directive = Directive.parse("2-16,types=a100:v100,unit=a100:2/v100:8")
    >>> directive.min_gpus, directive.max_gpus, directive.types
    (2, 16, ('a100', 'v100'))
    >>> list(directive.sizes("v100")), directive.allows(6, "a100")
    ([8, 16], True)
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
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, cast

from slurm_elastic.core.errors import InvalidInputError

#: Longest directive accepted, in bytes.
MAX_BYTES = 256
#: Largest number of GPUs in MIN, MAX and unit.
MAX_GPUS = 65536
#: Largest global batch.
MAX_BATCH = 1_000_000_000
#: Longest notice, in seconds.
MAX_NOTICE = 86400
#: Default fraction of useful progress that freezing may cost.
DEFAULT_MAX_PENALTY = 0.005

Parallel = Literal["data", "pipeline", "hybrid"]
Freeze = Literal["off", "auto"]

KEYS = ("types", "batch", "parallel", "freeze", "max-penalty", "notice", "unit")
_KNOWN = "known keys: " + ", ".join(KEYS)
_DIGITS = re.compile(r"[0-9]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_PERCENT = re.compile(r"([0-9]+)(?:\.([0-9]{1,4}))?%", re.ASCII)
_MIG = re.compile(r"mig|.*[0-9]g\.[0-9]", re.IGNORECASE | re.ASCII)
#: Steps of max-penalty: four decimals of a percent.
_PENALTY_STEPS = 1_000_000


class DirectiveError(InvalidInputError):
    """A directive that cannot be accepted.

    Attributes:
        part: The faulty part, as written.
        reason: What is wrong with it and what to write instead.
        text: The whole directive.
    """

    def __init__(self, part: str, reason: str, text: str = "") -> None:
        super().__init__(part, reason, text)
        self.part = part
        self.reason = reason
        self.text = text

    def __str__(self) -> str:
        return f"--elastic={_printable(self.text)}: {self.reason}"


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

    def __post_init__(self) -> None:
        if self.unit == 1:
            object.__setattr__(self, "unit", None)
        object.__setattr__(self, "max_penalty", _rounded(self.max_penalty))
        text = str(self)
        try:
            _fields(text)
            self._check_units()
        except DirectiveError as error:
            raise DirectiveError(error.part, error.reason, text) from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a directive.

        Args:
            text: What stands behind ``--elastic=``.

        Raises:
            DirectiveError: The text does not follow the grammar.
        """
        try:
            return cls(**_fields(text))  # type: ignore[arg-type]  # one dict for ten types
        except DirectiveError as error:
            raise DirectiveError(error.part, error.reason, text) from None

    def __str__(self) -> str:
        """Return the canonical form: fixed order, no defaults; it parses to an equal directive."""
        fields = [_range(self.min_gpus, self.max_gpus)]
        if self.types:
            fields.append("types=" + ":".join(self.types))
        if self.batch is not None:
            fields.append("batch=" + _range(*self.batch))
        if self.parallel != "data":
            fields.append("parallel=" + self.parallel)
        if self.freeze != "off":
            fields.append("freeze=" + self.freeze)
        if self.max_penalty != DEFAULT_MAX_PENALTY:
            fields.append("max-penalty=" + _percent(self.max_penalty))
        if self.notice_s is not None:
            fields.append(f"notice={self.notice_s}")
        if self.unit is not None:
            fields.append(f"unit={self.unit}")
        elif self.units:
            fields.append("unit=" + "/".join(f"{name}:{count}" for name, count in self.units))
        return ",".join(fields)

    def unit_for(self, gpu_type: str) -> int:
        """Return the GPUs per replica on this type."""
        return self.unit or dict(self.units).get(gpu_type, 1)

    def sizes(self, gpu_type: str) -> range:
        """Return the legal numbers of GPUs on this type, ascending; empty if it is not allowed."""
        if self.types and gpu_type not in self.types:
            return range(0)
        unit = self.unit_for(gpu_type)
        return range(_round_up(self.min_gpus, unit), self.max_gpus + 1, unit)

    def allows(self, gpus: int, gpu_type: str) -> bool:
        """Return whether the job may run on this many GPUs of this type."""
        return gpus in self.sizes(gpu_type)

    def start(self) -> tuple[int, str | None]:
        """Return the GPUs and their type to request for a job that names no shape of its own.

        No type (None) if the smallest size that every allowed type shares exists, so that the
        preference does not delay the start; else the most preferred type's smallest size.
        """
        if len(self.types) == 1:
            return self.sizes(self.types[0])[0], self.types[0]
        names = self.types or tuple(name for name, _ in self.units)
        common = math.lcm(self.unit or 1, *(self.unit_for(name) for name in names))
        gpus = _round_up(self.min_gpus, common)
        if gpus <= self.max_gpus:
            return gpus, None
        return self.sizes(names[0])[0], names[0]

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
            if _round_up(self.min_gpus, count) > self.max_gpus:
                span = f"{self.min_gpus}-{self.max_gpus}"
                raise DirectiveError(
                    part,
                    f"unit {part}: no multiple of {count} lies within {span};"
                    " widen MIN-MAX or change unit",
                )


def _fields(text: str) -> dict[str, object]:
    _check_bytes(text)
    first, *items = text.split(",")
    least, most = _gpus(first)
    values: dict[str, object] = {"min_gpus": least, "max_gpus": most}
    keys: set[str] = set()
    for position, item in enumerate(items, start=2):
        if not item:
            raise DirectiveError(
                f"part {position}", f"part {position} is empty; remove the extra comma"
            )
        key, equals, value = item.partition("=")
        if not equals:
            raise DirectiveError(item, f'"{item}" is not key=value; {_KNOWN}')
        if key not in KEYS:
            raise DirectiveError(key, f'key "{key}" is unknown; {_KNOWN}')
        if key in keys:
            raise DirectiveError(key, f"{key} is given twice; keep one")
        keys.add(key)
        values |= _READERS[key](value)
    return values


def _check_bytes(text: str) -> None:
    data = _octets(text)
    if not data:
        raise DirectiveError("", "nothing is given; write MIN-MAX, for example 2-16")
    if len(data) > MAX_BYTES:
        part = f"{len(data)} bytes"
        raise DirectiveError(part, f"{part} are more than the {MAX_BYTES} allowed; shorten it")
    for position, byte in enumerate(data, start=1):
        if not 0x21 <= byte <= 0x7E:
            part = f"0x{byte:02x}"
            raise DirectiveError(
                part,
                f"byte {part} at position {position} is not allowed;"
                " use printable ASCII without spaces",
            )


def _gpus(word: str) -> tuple[int, int]:
    low, dash, high = word.partition("-")
    if not _DIGITS.fullmatch(low) or (dash and not _DIGITS.fullmatch(high)):
        raise DirectiveError(
            word, f'"{word}" is neither a number of GPUs nor a range; begin with 2 or 2-16'
        )
    least = _number(low, "MIN" if dash else "GPUs", MAX_GPUS)
    most = _number(high, "MAX", MAX_GPUS) if dash else least
    if least > most:
        raise DirectiveError(word, f"MIN {least} is larger than MAX {most}; write {most}-{least}")
    return least, most


def _types(value: str) -> dict[str, object]:
    names: list[str] = []
    for name in value.split(":"):
        _check_name(name, names, key="types", example="types=a100:v100")
        names.append(name)
    return {"types": tuple(names)}


def _batch(value: str) -> dict[str, object]:
    low, dash, high = value.partition("-")
    if not _DIGITS.fullmatch(low) or (dash and not _DIGITS.fullmatch(high)):
        raise DirectiveError(
            value, f'batch "{value}" is neither a number nor a range; write batch=256-4096'
        )
    least = _number(low, "batch", MAX_BATCH)
    most = _number(high, "batch", MAX_BATCH) if dash else least
    if least > most:
        raise DirectiveError(
            value, f"batch {least} is larger than {most}; write batch={most}-{least}"
        )
    return {"batch": (least, most)}


def _parallel(value: str) -> dict[str, object]:
    if value not in {"data", "pipeline", "hybrid"}:
        raise DirectiveError(
            value, f'parallel "{value}" is unknown; write data, pipeline or hybrid'
        )
    return {"parallel": cast("Parallel", value)}


def _freeze(value: str) -> dict[str, object]:
    if value not in {"off", "auto"}:
        raise DirectiveError(value, f'freeze "{value}" is unknown; write off or auto')
    return {"freeze": cast("Freeze", value)}


def _max_penalty(value: str) -> dict[str, object]:
    match = _PERCENT.fullmatch(value)
    if match is None:
        raise DirectiveError(
            value,
            f'max-penalty "{value}" is not a percentage of at most 4 decimals;'
            " write max-penalty=0.5%",
        )
    whole, decimals = match.groups(default="")
    steps = int(whole) * 10_000 + int(decimals.ljust(4, "0"))
    if steps > _PENALTY_STEPS:
        raise DirectiveError(
            value, f"max-penalty {value} is outside 0%-100%; write max-penalty=0.5%"
        )
    return {"max_penalty": steps / _PENALTY_STEPS}


def _notice(value: str) -> dict[str, object]:
    if not _DIGITS.fullmatch(value):
        raise DirectiveError(value, f'notice "{value}" is not a number of seconds; write notice=60')
    return {"notice_s": _number(value, "notice", MAX_NOTICE)}


def _unit(value: str) -> dict[str, object]:
    if _DIGITS.fullmatch(value):
        return {"unit": _number(value, "unit", MAX_GPUS)}
    example = "unit=4 or unit=a100:2/v100:8"
    units: dict[str, int] = {}
    for pair in value.split("/"):
        name, colon, count = pair.partition(":")
        if not colon or not _DIGITS.fullmatch(count):
            raise DirectiveError(
                pair, f'unit "{pair}" is neither a number of GPUs nor TYPE:GPUs; write {example}'
            )
        _check_name(name, list(units), key="unit", example=example)
        units[name] = _number(count, "unit", MAX_GPUS)
    return {"units": tuple(units.items())}


_READERS: dict[str, Callable[[str], dict[str, object]]] = {
    "types": _types,
    "batch": _batch,
    "parallel": _parallel,
    "freeze": _freeze,
    "max-penalty": _max_penalty,
    "notice": _notice,
    "unit": _unit,
}


def _check_name(name: str, names: list[str], *, key: str, example: str) -> None:
    if not name:
        raise DirectiveError(name, f"{key} has an empty name; write {example}")
    if not _NAME.fullmatch(name):
        raise DirectiveError(
            name, f'{key}: "{name}" may hold only A-Z a-z 0-9 _ . -; write {example}'
        )
    if _MIG.match(name):
        raise DirectiveError(
            name, f'{key}: "{name}" is a slice of a GPU (MIG); name types of whole GPUs'
        )
    if name in names:
        raise DirectiveError(name, f"{key}: {name} is listed twice; keep one")


def _number(digits: str, label: str, largest: int) -> int:
    value = int(digits)
    if not 1 <= value <= largest:
        raise DirectiveError(
            digits, f"{label} {digits} is outside 1-{largest}; write a number in between"
        )
    return value


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _rounded(fraction: float) -> float:
    return round(fraction * _PENALTY_STEPS) / _PENALTY_STEPS


def _percent(fraction: float) -> str:
    whole, decimals = divmod(round(fraction * _PENALTY_STEPS), 10_000)
    return f"{whole}.{decimals:04}".rstrip("0").rstrip(".") + "%"


def _octets(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _printable(text: str) -> str:
    data = _octets(text)
    shown = bytes(byte if 0x21 <= byte <= 0x7E else 0x3F for byte in data[:MAX_BYTES])
    return shown.decode("ascii") + ("..." if len(data) > MAX_BYTES else "")
