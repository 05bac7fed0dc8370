"""Grammar of the directive: from text to checked fields, and the error of a faulty one.

`Directive` in `slurm_elastic/core/directive.py` holds the fields, and checks them against each
other. ``plugins/lua/slurm_elastic_directive.lua`` checks the same grammar with the same words.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, cast

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

Parallel = Literal["data", "pipeline", "hybrid", "spatial"]
Freeze = Literal["off", "auto"]
InPlace = Literal["auto", "never"]
PlanChoice = Literal["own", "auto"]
Share = Literal["no", "yes"]

KEYS = (
    *("types", "batch", "parallel", "freeze", "max-penalty", "notice", "unit", "sizes"),
    *("in-place", "plan", "share"),
)
_KNOWN = "known keys: " + ", ".join(KEYS)
_DIGITS = re.compile(r"[0-9]+", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.-]+", re.ASCII)
_PERCENT = re.compile(r"([0-9]+)(?:\.([0-9]{1,4}))?%", re.ASCII)
_MIG = re.compile(r"mig|.*[0-9]g\.[0-9]", re.IGNORECASE | re.ASCII)
#: Steps of max-penalty: four decimals of a percent.
_PENALTY_STEPS = 1_000_000


@lru_cache(maxsize=1024)
def is_slice(gpu_type: str) -> bool:
    """Return whether a type of GPUs is named as a slice of one (MIG), which cannot be resized."""
    return _MIG.match(gpu_type) is not None


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


def read_fields(text: str) -> dict[str, object]:
    """Return the fields of `Directive` that a text gives, each checked alone.

    Raises:
        DirectiveError: The text does not follow the grammar.
    """
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
    if value not in {"data", "pipeline", "hybrid", "spatial"}:
        raise DirectiveError(
            value, f'parallel "{value}" is unknown; write data, pipeline, hybrid or spatial'
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


def _in_place(value: str) -> dict[str, object]:
    if value not in {"auto", "never"}:
        raise DirectiveError(value, f'in-place "{value}" is unknown; write auto or never')
    return {"in_place": cast("InPlace", value)}


def _plan(value: str) -> dict[str, object]:
    if value not in {"own", "auto"}:
        raise DirectiveError(value, f'plan "{value}" is unknown; write own or auto')
    return {"plan": cast("PlanChoice", value)}


def _share(value: str) -> dict[str, object]:
    if value not in {"no", "yes"}:
        raise DirectiveError(value, f'share "{value}" is unknown; write no or yes')
    return {"share": cast("Share", value)}


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


def _sizes(value: str) -> dict[str, object]:
    sizes: list[int] = []
    for digits in value.split(":"):
        if not _DIGITS.fullmatch(digits):
            raise DirectiveError(
                digits, f'sizes "{digits}" is not a number of GPUs; write sizes=1:2:4'
            )
        size = _number(digits, "sizes", MAX_GPUS)
        if size in sizes:
            raise DirectiveError(digits, f"sizes: {size} is listed twice; keep one")
        sizes.append(size)
    return {"listed": tuple(sizes)}


_READERS: dict[str, Callable[[str], dict[str, object]]] = {
    "types": _types,
    "batch": _batch,
    "parallel": _parallel,
    "freeze": _freeze,
    "max-penalty": _max_penalty,
    "notice": _notice,
    "unit": _unit,
    "sizes": _sizes,
    "in-place": _in_place,
    "plan": _plan,
    "share": _share,
}


def _check_name(name: str, names: list[str], *, key: str, example: str) -> None:
    if not name:
        raise DirectiveError(name, f"{key} has an empty name; write {example}")
    if not _NAME.fullmatch(name):
        raise DirectiveError(
            name, f'{key}: "{name}" may hold only A-Z a-z 0-9 _ . -; write {example}'
        )
    if is_slice(name):
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


def printed_range(low: int, high: int) -> str:
    """Return a range as a directive writes it: `4`, or `2-16`."""
    return str(low) if low == high else f"{low}-{high}"


def rounded(fraction: float) -> float:
    """Return a penalty rounded to the four decimals of a percent that the grammar has."""
    return round(fraction * _PENALTY_STEPS) / _PENALTY_STEPS


def percent(fraction: float) -> str:
    """Return a penalty as a directive writes it, without trailing zeros: `0.5%`."""
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
