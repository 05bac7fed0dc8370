"""The values of one section of a TOML file, checked against a dataclass.

A field's metadata bounds it: `min`, `max`, `known` (words), `keys` (of a table), `check`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, get_args, get_type_hints

from slurm_elastic.core.errors import InvalidInputError


class ConfigError(InvalidInputError):
    """The configuration cannot be used; the message names file, line, culprit and remedy."""


def read_section(cls: Any, section: str, content: dict[str, Any], text: str, name: str) -> Any:
    """One section as an instance of its dataclass; `text` and `name` are the file's.

    Raises:
        ConfigError: an unknown key, or a value that cannot be.
    """
    hints = get_type_hints(cls)
    specs = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in content.items():
        where = where_is(text, name, section, key)
        if key not in specs:
            raise ConfigError(
                f"{where}: {key[:40]} is unknown in [{section}]; known: {', '.join(specs)}"
            )
        try:
            values[key] = _value(hints[key], value, dict(specs[key].metadata))
        except ValueError as error:
            raise ConfigError(f"{where}: {key} {error}") from None
    return cls(**values)


def _value(hint: Any, value: Any, bounds: dict[str, Any]) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r:.60}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if hint in (int, float):
        if not isinstance(value, hint) or isinstance(value, bool):
            raise ValueError(f"must be a number, not {value!r:.60}")
        low, high = bounds.get("min", -math.inf), bounds.get("max", math.inf)
        if not low <= value <= high:
            raise ValueError(f"is {value:g}; it must be from {low:g} to {high:g}")
        return value
    if hint is str:
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {value!r:.60}")
        return _timers(value) if bounds.get("check") == "timers" else _known(value, bounds)
    kind = get_args(hint)[-1]
    if kind in (int, float):
        keys = bounds.get("keys", ())
        if not isinstance(value, dict):
            raise ValueError(f"must be a table, e.g. {{ {keys[0] if keys else 'a100'} = 2 }}")
        return _table(kind, value, keys, bounds)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError('must be a list of text, e.g. ["gpu"]')
    return tuple(_known(v, bounds) for v in value)


def _table(
    kind: type, value: dict[str, Any], keys: tuple[str, ...], bounds: dict[str, Any]
) -> dict[str, Any]:
    found = {}
    least = {"min": 1 if kind is int else 1e-6, "max": 1e6}
    for name, number in value.items():
        if keys and name not in keys:
            raise ValueError(f'"{name[:40]}" is unknown; known: {", ".join(keys)}')
        try:
            found[name] = _value(kind, number, bounds if "max" in bounds else least)
        except ValueError as error:
            raise ValueError(f"of {name[:40]} {error}") from None
    return found


def _timers(value: str) -> str:
    words = ("own", "fixed", "auto", "nowait", "full")
    node, _, rack = value.partition(",")
    try:
        good = value in words or 0 <= float(node) <= float(rack)
    except ValueError:
        good = False
    if not good:
        raise ValueError(
            f'"{value[:40]}" cannot be; write {", ".join(words)}, or NODE,RACK in leases with NODE'
            " not above RACK, e.g. 12,24"
        )
    return value


def _known(value: str, bounds: dict[str, Any]) -> str:
    known = bounds.get("known")
    if known and value not in known:
        raise ValueError(f'"{value[:40]}" is unknown; known: {", ".join(known)}')
    return value


def where_is(text: str, name: str, section: str, key: str | None = None) -> str:
    """`file:line` of a key, as tomllib does not keep positions."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\s*([\w-]+)", line)
        if header:
            inside = header[1] == section
            if inside and key is None:
                return f"{name}:{number}"
        elif (inside and key and re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line)) or (
            key is None and re.match(rf"\s*{re.escape(section)}\s*=", line)
        ):
            return f"{name}:{number}"
    return name
