"""Verbs and options of selastic, as click defines them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_elastic.cli import main

TEMPLATES = Path(__file__).parent / "templates"

#: An option that at least so many verbs have is described once for all of them.
_COMMON = 3


def verbs() -> Iterator[tuple[str, click.Command]]:
    """Yield each verb by its words, `workload generate` as two; groups are left out."""
    context = click.Context(main.selastic)
    for name in main.selastic.list_commands(context):
        command = main.selastic.get_command(context, name)
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", each) for inner, each in command.commands.items())
        elif command:
            yield name, command


def groups() -> dict[str, list[str]]:
    """Return the verbs that need a second word, with those words."""
    found: dict[str, list[str]] = {}
    for name, _ in verbs():
        first, _, second = name.partition(" ")
        if second:
            found.setdefault(first, []).append(second)
    return found


def options(command: click.Command) -> list[click.Option]:
    """Return the options of a command."""
    return [p for p in command.params if isinstance(p, click.Option)]


def arguments(command: click.Command) -> list[click.Argument]:
    """Return the arguments of a command."""
    return [p for p in command.params if isinstance(p, click.Argument)]


def identity(option: click.Option) -> tuple[object, ...]:
    """Return the parts that distinguish an option from others of the same name."""
    return (*option.opts, option.metavar, option.help)


def common_options() -> list[click.Option]:
    """Return the options that several verbs share."""
    counts = Counter(identity(o) for _, verb in verbs() for o in options(verb))
    shared = {identity(o): o for _, verb in verbs() for o in options(verb)}
    return [o for key, o in shared.items() if counts[key] >= _COMMON]


def value_name(option: click.Option) -> str:
    """Return the placeholder of an option's value; "" for a flag."""
    if option.is_flag or option.count:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(option.type.choices)
    return option.metavar or (option.name or "").upper()


def takes_file(placeholder: str) -> bool:
    """Return whether a value or argument is a path."""
    words = {"FILE", "DIR", "PATH", "PROFILE", "WORKLOAD", "PROGRAM"}
    return bool(words & set(re.findall(r"[A-Z]+", placeholder)))
