"""The values of one section of a TOML file, checked against a dataclass of `key` fields."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, get_args, get_type_hints

from slurm_elastic.config.key import ConfigKey, key_of
from slurm_elastic.core.errors import InvalidInputError

#: Bounds of the values of a table that states none: above 0.
_TABLE_BOUNDS = {int: (1, 1e6), float: (1e-6, 1e6)}


class ConfigError(InvalidInputError):
    """Unusable configuration; the message names file, line, value and remedy."""


def read_section(cls: Any, section: str, content: dict[str, Any], text: str, name: str) -> Any:
    """Return one section as an instance of its dataclass; `text` and `name` are the file's.

    Raises:
        ConfigError: an unknown key, or an invalid value.
    """
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for key, value in content.items():
        location = where_is(text, name, section, key)
        if key not in fields:
            raise ConfigError(
                f"{location}: {key[:40]} is unknown in [{section}]; known: {', '.join(fields)}"
            )
        try:
            values[key] = _value(hints[key], value, key_of(fields[key]))
        except ValueError as error:
            raise ConfigError(f"{location}: {key} {error}") from None
    return cls(**values)


def _value(hint: Any, value: Any, key: ConfigKey) -> Any:
    if hint is bool:
        if not isinstance(value, bool):
            raise _invalid(value, "true or false")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 2**1000 else math.inf
    if hint in (int, float):
        return _number(hint, value, key.bounds)
    if hint is str:
        return _text(value, key)
    item = get_args(hint)[-1]
    if item in (int, float):
        return _table(item, value, key)
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _invalid(value, 'a list of text; write e.g. ["gpu"]')
    return tuple(_text(v, key) for v in value)


def _invalid(value: Any, expected: str) -> ValueError:
    shown = f"{value:.15g}" if type(value) is float else f"{value!r:.60}"
    return ValueError(f"= {shown} is invalid: expected {expected}")


def _number(hint: Any, value: Any, bounds: tuple[float, float] | None) -> Any:
    if not isinstance(value, hint) or isinstance(value, bool):
        raise _invalid(value, "a whole number" if hint is int else "a number")
    low, high = bounds or (-math.inf, math.inf)
    if not low <= value <= high:
        raise _invalid(value, f"{low:.15g} to {high:.15g}")
    return value


def _text(value: Any, key: ConfigKey) -> str:
    if not isinstance(value, str):
        raise _invalid(value, "text")
    if key.choices and value not in key.choices:
        raise ValueError(f'"{value[:40]}" is unknown; known: {", ".join(key.choices)}')
    if key.parse:
        try:
            key.parse(value)
        except ValueError as error:
            raise _invalid(value[:40], str(error)) from None
    return value


def _table(item: Any, value: Any, key: ConfigKey) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(value, f"a table; write e.g. {{ {(*key.names, 'a100')[0]} = 2 }}")
    numbers = {}
    for name, number in value.items():
        if key.names and name not in key.names:
            raise ValueError(f'"{name[:40]}" is unknown; known: {", ".join(key.names)}')
        bounded = ConfigKey("", bounds=key.bounds or _TABLE_BOUNDS[item])
        try:
            numbers[name] = _value(item, number, bounded)
        except ValueError as error:
            raise ValueError(f"of {name[:40]} {error}") from None
    return numbers


def where_is(text: str, name: str, section: str, key: str | None = None) -> str:
    """Return `file:line` of a key, as tomllib does not keep positions."""
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
