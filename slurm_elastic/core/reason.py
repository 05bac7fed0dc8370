"""Reasons of decisions: a code and its parameters. Texts for people: `cli.reason_text`.

>>> reason = Reason("gpus-kept", gpus=4, gpu_type="a100", nodes=["g01", "g02"])
>>> print(reason)
gpus-kept gpus=4 gpu_type=a100 nodes=g01,g02
>>> Reason.from_log(str(reason)) == Reason.from_json(reason.to_json()) == reason
True
>>> Reason("holds-max", gpus=8) == Reason("holds-max", gpus=8)
True
"""

from __future__ import annotations

import json
import math
import operator
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Union

from slurm_elastic.core.reasons.reason_codes import DEFINITIONS
from slurm_elastic.core.reasons.reason_definition import Parameter, ParameterKind, ReasonDefinition

Shape = tuple[str, int]
Value = Union[
    None,
    bool,
    int,
    float,
    str,
    tuple[str | None, ...],
    tuple[Shape, ...],
    "Reason",
    tuple["Reason", ...],
]

_NUMBERS = frozenset(
    (
        ParameterKind.NUMBER,
        ParameterKind.FRACTION,
        ParameterKind.SECONDS,
        ParameterKind.TIME,
    )
)
_LISTS = frozenset((ParameterKind.NODES, ParameterKind.JOBS, ParameterKind.USERS))
#: Values that stand in a log line without quotes.
_BARE = re.compile(r"[\w.:+@/\[\]-]+")
_LOG_KEY = re.compile(r"\s*(\w+)=")
_LOG_TIME = "%Y-%m-%dT%H:%M:%S"


@dataclass(frozen=True, slots=True, init=False)
class Reason:
    """A code of `reason_codes` and its parameters; an immutable, hashable value.

    Job parameters hold ids as people type them (`4711`, `4711_3`).

    Raises:
        ValueError: the code is not defined, or its parameters are wrong.
    """

    code: str
    _items: tuple[tuple[str, Value], ...]

    def __init__(self, code: str, /, **parameters: object) -> None:
        if code not in _FIELDS:
            raise ValueError(f"reason: code {code!r} is invalid: expected one of docs/reasons.md")
        object.__setattr__(self, "code", code)
        object.__setattr__(self, "_items", tuple(_checked(code, parameters)))

    @property
    def parameters(self) -> dict[str, Value]:
        """Parameters by name, in the order of their definition; None: not known, or hidden."""
        return dict(self._items)

    @property
    def definition(self) -> ReasonDefinition:
        """The definition of the code."""
        return DEFINITIONS[self.code]

    def to_json(self) -> dict[str, Any]:
        """Return {"code", "parameters"} of plain JSON values."""
        return {"code": self.code, "parameters": {k: _plain(v) for k, v in self._items}}

    @classmethod
    def from_json(cls, value: object) -> Reason | None:
        """Return the reason of a JSON value; None for none.

        A sentence, as version 0.1.0 kept it, becomes the code `text`; so does what another
        version wrote and this one cannot read.
        """
        if not value:
            return None
        if isinstance(value, Mapping) and isinstance(value.get("parameters"), Mapping):
            try:
                return cls(str(value.get("code")), **value["parameters"])
            except (ValueError, TypeError):
                pass
        return cls("text", text=value if isinstance(value, str) else json.dumps(value, default=str))

    def __str__(self) -> str:
        """Form the value of a log line: `holds-max gpus=8`."""
        kinds = {p.name: p.kind for p in self.definition.parameters}
        shown = (f"{k}={_logged(kinds[k], v)}" for k, v in self._items if v is not None)
        return " ".join((self.code, *shown))

    @classmethod
    def from_log(cls, text: str) -> Reason:
        """Return the reason of a log line; numbers there are rounded.

        Raises:
            ValueError: it is none.
        """
        code, _, fields = text.strip().partition(" ")
        definition = DEFINITIONS.get(code)
        kinds = {p.name: p.kind for p in definition.parameters} if definition else {}
        parameters: dict[str, object] = {}
        at = 0
        while match := _LOG_KEY.match(fields, at):
            name, at = match[1], match.end()
            if fields[at : at + 1] in ('"', "[", "{"):
                parameters[name], at = json.JSONDecoder().raw_decode(fields, at)
                continue
            word = fields[at:].split(" ", 1)[0]
            parameters[name], at = _unlogged(kinds.get(name), word), at + len(word)
        return cls(code, **parameters)

    def hidden(self, *, job: Callable[[str], bool], user: Callable[[str], bool]) -> Reason:
        """Return the reason without what may not be shown: None stands in its place.

        Finished sentences may name any job, so they are never shown.

        Args:
            job: whether the job of an id may be shown.
            user: whether a user's name may be shown.
        """
        parameters = {
            p.name: _hidden(p.kind, value, job=job, user=user)
            for p, (_, value) in zip(self.definition.parameters, self._items, strict=True)
        }
        return Reason(self.code, **parameters)


def log_form(reason: Reason | None) -> str:
    """Return the value of a log line; "" for no reason."""
    return "" if reason is None else str(reason)


def _checked(code: str, parameters: dict[str, Any]) -> Iterator[tuple[str, Value]]:
    """Yield the parameters in the order of the definition, as plain Python values."""
    for name, nullable, plain in _FIELDS[code]:
        value = parameters.pop(name, None)
        if value is None:
            if not nullable:
                raise ValueError(f"reason {code}: parameter {name} is missing")
            yield name, None
            continue
        try:
            yield name, plain(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reason {code}: {name} = {value!r} is invalid: expected {error}"
            ) from None
    if parameters:
        raise ValueError(f"reason {code}: unknown parameters {', '.join(parameters)}")


def _plain_form(parameter: Parameter) -> Callable[[Any], Value]:
    """Return the function that makes a plain Python value of a parameter, or raises."""
    if parameter.kind in _NUMBERS:
        return _finite_or_none if parameter.optional else _finite
    if parameter.choices:
        return partial(_choice, parameter.choices)
    return _PLAIN.get(parameter.kind, _string)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a finite number")
    return number


def _finite_or_none(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _choice(choices: tuple[str, ...], value: str) -> str:
    if value not in choices:
        raise ValueError(f"one of {', '.join(choices)}")
    return value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a string")
    return value


def _sequence(value: object) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("a list")
    return value


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(_string, _sequence(value)))


def _names_or_hidden(value: object) -> tuple[str | None, ...]:
    return tuple(None if v is None else _string(v) for v in _sequence(value))


def _shapes(value: object) -> tuple[Shape, ...]:
    return tuple((_string(t), operator.index(g)) for t, g in _sequence(value))


def _nested(value: object) -> Reason:
    if isinstance(value, Reason):
        return value
    reason = Reason.from_json(value)
    if reason is None or isinstance(value, str):
        raise TypeError("a reason")
    return reason


def _nested_all(value: object) -> tuple[Reason, ...]:
    return tuple(map(_nested, _sequence(value)))


#: Conversion of values of a kind to plain Python values; those of the other kinds are strings.
_PLAIN: Mapping[ParameterKind, Callable[[Any], Value]] = {
    ParameterKind.COUNT: operator.index,
    ParameterKind.FLAG: bool,
    ParameterKind.NODES: _names,
    ParameterKind.JOBS: _names_or_hidden,
    ParameterKind.USERS: _names_or_hidden,
    ParameterKind.SHAPES: _shapes,
    ParameterKind.REASON: _nested,
    ParameterKind.REASONS: _nested_all,
}
#: Parameters of each code, in order: name, whether None is allowed, and the conversion of the value
#: to a plain one.
_FIELDS: Mapping[str, tuple[tuple[str, bool, Callable[[Any], Value]], ...]] = {
    code: tuple((p.name, p.optional or p.kind.hideable, _plain_form(p)) for p in d.parameters)
    for code, d in DEFINITIONS.items()
}


def _plain(value: Value) -> Any:
    if isinstance(value, Reason):
        return value.to_json()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]  # type: ignore[arg-type]
    return value


def _logged(kind: ParameterKind, value: Value) -> str:
    if kind is ParameterKind.TIME and isinstance(value, float):
        return time.strftime(_LOG_TIME, time.localtime(value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and _BARE.fullmatch(value) and value[0] != "[":
        return value
    if kind in _LISTS and isinstance(value, tuple) and value:
        names = ["-" if v is None else str(v) for v in value]
        if all(_BARE.fullmatch(n) for n in names):
            return ",".join(names)
    return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))


def _unlogged(kind: ParameterKind | None, word: str) -> object:
    if kind is ParameterKind.COUNT:
        return int(word)
    if kind is ParameterKind.TIME:
        return time.mktime(time.strptime(word, _LOG_TIME))
    if kind in _NUMBERS:
        return float(word)
    if kind is ParameterKind.FLAG:
        return word == "true"
    if kind in _LISTS:
        return [None if v == "-" else v for v in word.split(",")]
    return word


def _hidden(
    kind: ParameterKind,
    value: Value,
    *,
    job: Callable[[str], bool],
    user: Callable[[str], bool],
) -> Value:
    if isinstance(value, Reason):
        return value.hidden(job=job, user=user)
    if kind is ParameterKind.REASONS and isinstance(value, tuple):
        return tuple(v.hidden(job=job, user=user) for v in value if isinstance(v, Reason))
    if kind is ParameterKind.SENTENCE:
        return None
    shown = {
        ParameterKind.JOB: job,
        ParameterKind.JOBS: job,
        ParameterKind.USER: user,
        ParameterKind.USERS: user,
    }.get(kind)
    if shown is None:
        return value
    if isinstance(value, tuple):
        return tuple(v if isinstance(v, str) and shown(v) else None for v in value)
    return value if isinstance(value, str) and shown(value) else None
