"""Documentation of elastic.toml, generated from the schema that validates it.

`example` is etc/elastic.toml, printed by `selastic config`: every value is commented out, so that
keys that are not set follow the defaults of the release. contrib/generate makes elastic.toml(5) of
`sections`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from slurm_elastic.config import schema
from slurm_elastic.config.key import ConfigKey, key_of, title_of

_HEAD = """\
# elastic.toml: configuration of slurm-elastic, /etc/slurm-elastic/elastic.toml (elastic.toml(5)).
# Commented values are the defaults. `selastic check` finds faults of a site's configuration,
# `selastic reconfigure` makes the controller read this file again.
"""

#: Columns of a comment in the example.
_WIDTH = 96


class KeyText(NamedTuple):
    """One key in words: its description, its permitted values, its default in TOML."""

    name: str
    description: str
    permitted: str
    default: str


def example() -> str:
    """Return the commented example configuration."""
    parts = [_HEAD]
    for section, title, keys in sections():
        parts.append(f"\n[{section}]  # {title}\n")
        for key in keys:
            lines = textwrap.wrap(
                f"{key.description} {key.permitted}".strip(), _WIDTH, break_on_hyphens=False
            )
            parts += [f"# {line}\n" for line in lines]
            parts.append(f"#{key.name} = {key.default}\n")
    return "".join(parts)


def sections() -> Iterator[tuple[str, str, tuple[KeyText, ...]]]:
    """Yield name, title and keys of each section."""
    types = get_type_hints(schema.Config)
    for section in dataclasses.fields(schema.Config):
        keys = (_key_text(field) for field in dataclasses.fields(types[section.name]))
        yield section.name, title_of(section), tuple(keys)


def _key_text(field: dataclasses.Field[Any]) -> KeyText:
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    key = key_of(field)
    return KeyText(field.name, key.description, _permitted(key), _toml(default))


def _permitted(key: ConfigKey) -> str:
    if key.choices:
        return f"One of {', '.join(key.choices)}."
    if key.names:
        return f"Of {', '.join(key.names)}."
    if key.bounds:
        low, high = key.bounds
        return f"From {low:.15g} to {high:.15g}."
    return ""


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f" {k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value)
