"""Texts about elastic.toml, made from the schema that validates it.

`example` is etc/elastic.toml and what `selastic config` prints: every value is
commented out, so that what is not set follows the defaults of the release.
`manual` is docs/man/elastic.toml.5.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

from slurm_elastic.config import schema

_HEAD = """\
# elastic.toml: configuration of slurm-elastic, /etc/slurm-elastic/elastic.toml (elastic.toml(5)).
# Commented values are the defaults. `selastic check` tells what is wrong with a site,
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
It has to be readable by everybody and holds no secrets.
What is not set has its default.
A key or a value that cannot be is refused with its line; a file that
.B selastic reconfigure
finds broken changes nothing.
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

_COMMENT = re.compile(r"\s*#: ?(.*)")
_FIELD = re.compile(r"\s+(\w+)\s*:")


class Key(NamedTuple):
    """One key: what the schema's comment says, its bounds in words, its default in TOML."""

    name: str
    about: tuple[str, ...]
    bounds: str
    default: str


def example() -> str:
    """The commented file."""
    parts = [_HEAD]
    for section, title, keys in sections():
        parts.append(f"\n[{section}]" + (f"  # {title}" if title else "") + "\n")
        for key in keys:
            notes = [*key.about, key.bounds] if key.bounds else key.about
            parts += [f"# {line}\n" for line in notes]
            parts.append(f"#{key.name} = {key.default}\n")
    return "".join(parts)


def manual() -> str:
    """The manual page."""
    parts = [_MANUAL_HEAD]
    for section, title, keys in sections():
        parts.append(f".SH [{section}]\n")
        parts.append(f"{_roff(title[:1].upper() + title[1:])}.\n" if title else "")
        for key in keys:
            text = "\n".join(_roff(line) for line in (*key.about, key.bounds) if line)
            parts.append(f'.TP\n.BR {key.name} " = {_roff(key.default, quoted=True)}"\n')
            parts.append(f"{text}\n" if text else "\\&\n")
    return "".join([*parts, _MANUAL_TAIL])


def sections() -> Iterator[tuple[str, str, tuple[Key, ...]]]:
    """Name, title and keys of each section."""
    for field in dataclasses.fields(schema.Config):
        cls: Any = get_type_hints(schema.Config)[field.name]
        first = inspect.cleandoc(cls.__doc__ or "").splitlines()[0]
        yield field.name, first.removeprefix(f"`[{field.name}]`").strip(":. "), tuple(_keys(cls))


def _keys(cls: Any) -> Iterator[Key]:
    comments = _comments(cls)
    for field in dataclasses.fields(cls):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        about = tuple(comments.get(field.name, ()))
        yield Key(field.name, about, _bounds(field.metadata), _toml(default))


def _comments(cls: Any) -> dict[str, list[str]]:
    """The `#:` comments above each field."""
    found: dict[str, list[str]] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        comment, field = _COMMENT.fullmatch(line), _FIELD.match(line)
        if comment:
            above.append(comment[1])
        elif field:
            found[field[1]], above = above, []
    return found


def _bounds(metadata: Any) -> str:
    if "known" in metadata:
        return f"One of {', '.join(metadata['known'])}."
    if "keys" in metadata:
        return f"Of {', '.join(metadata['keys'])}."
    if "min" in metadata and "max" in metadata:
        return f"From {metadata['min']:.15g} to {metadata['max']:.15g}."
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


def _roff(text: str, *, quoted: bool = False) -> str:
    """Text as it is, for roff; `quoted` inside a macro's argument."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = text.replace('"', "\\(dq") if quoted else re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return f"\\&{text}" if text.startswith((".", "'")) else text
