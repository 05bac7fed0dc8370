"""Documentation of elastic.toml, generated from the schema that validates it.

`example` is etc/elastic.toml, printed by `selastic config`: every value is commented out, so that
keys that are not set follow the defaults of the release. `manual` is docs/man/elastic.toml.5.
"""

from __future__ import annotations

import dataclasses
import re
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

_MANUAL_HEAD = r""".TH elastic.toml 5 "" "slurm-elastic" "slurm-elastic"
.SH NAME
elastic.toml \- configuration of slurm-elastic
.SH SYNOPSIS
.I /etc/slurm\-elastic/elastic.toml
.SH DESCRIPTION
A TOML file, read by
.BR selasticd (8)
and, for the section
.IR [api] ,
by
.BR selastic (1)
and
.BR esrun (1)
on every host.
It must be readable by all users and holds no secrets.
A key that is not set has its default.
An unknown key or an invalid value is an error that names its line; a file with an error changes
nothing at
.BR "selastic reconfigure" .
.B selastic config
prints all keys with their defaults.
"""
_MANUAL_TAIL = r""".SH EXAMPLE
.nf
[controller]
mode = "act"
partitions = ["gpu"]

[api]
controller = "ctld:7321"

[speedup]
types = { a100 = 2.0, v100 = 1.0 }
.fi
.SH SEE ALSO
.BR selastic (1),
.BR selasticd (8),
.BR esrun (1)
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


def manual() -> str:
    """Return the manual page elastic.toml(5)."""
    parts = [_MANUAL_HEAD]
    for section, title, keys in sections():
        parts.append(f".SH [{section}]\n{roff(title[:1].upper() + title[1:])}.\n")
        for key in keys:
            parts.append(f'.TP\n.BR {key.name} " = {roff(key.default, quoted=True)}"\n')
            parts += [f"{roff(text)}\n" for text in (key.description, key.permitted) if text]
    return "".join([*parts, _MANUAL_TAIL])


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


def roff(text: str, *, quoted: bool = False) -> str:
    """Return text escaped for roff, `words` in bold; `quoted`: inside a macro's argument."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = text.replace('"', "\\(dq") if quoted else re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return f"\\&{text}" if text.startswith((".", "'")) else text
