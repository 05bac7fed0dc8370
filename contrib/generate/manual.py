"""Manual pages in roff: templates with the options, verbs and keys of the definitions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import click

from contrib.generate.definitions import (
    TEMPLATES,
    arguments,
    common_options,
    identity,
    options,
    value_name,
    verbs,
)
from slurm_elastic.cli import main
from slurm_elastic.config import documentation
from slurm_elastic.controller import daemon
from slurm_elastic.job import esrun_options

#: Between two sentences; roff wants each on a line.
_SENTENCE = re.compile(r"(?<=[.;])(?<!e\.g\.) (?=[A-Z])")
_PAGES = ("selastic.1", "esrun.1", "elastic.toml.5", "selasticd.8")


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    parts: dict[str, Callable[[list[str]], str]] = {
        "@verbs": _verbs,
        "@shared": lambda _: _listed(_shared_options()),
        "@options": _options,
        "@keys": lambda _: _keys(),
    }

    def filled(line: str) -> str:
        name, *words = line.split()
        return parts[name](words) if name in parts else f"{line}\n"

    _check_verbs((TEMPLATES / "selastic.1").read_text("utf-8"))

    return {
        name: "".join(
            filled(line) if line.startswith("@") else f"{line}\n"
            for line in (TEMPLATES / name).read_text("utf-8").splitlines()
        )
        for name in _PAGES
    }


def _check_verbs(template: str) -> None:
    """Check that the template names each verb, so that the page has it.

    Raises:
        SystemExit: a verb is missing.
    """
    named = set(" ".join(re.findall(r"^@verbs (.*)", template, re.MULTILINE)).split())
    for name in dict.fromkeys(name.partition(" ")[0] for name, _ in verbs()):
        if name not in named:
            raise SystemExit(
                f"contrib/generate/templates/selastic.1: verb {name} is missing: "
                "add it to the line `@verbs` of its section"
            )


def _verbs(names: list[str]) -> str:
    """Return the verbs whose first word is named, each with the options that only it has."""
    return "".join(
        _verb(name, command) for name, command in verbs() if name.partition(" ")[0] in names
    )


def _verb(name: str, command: click.Command) -> str:
    once = {identity(o) for o in (*common_options(), *_shared_options())}
    own = [o for o in options(command) if identity(o) not in once]
    more = ["[\\fIOPTION\\fR...]"] if options(command) else []
    takes = [f"\\fI{_escaped(_argument(a))}\\fR" for a in arguments(command)]
    usage = " ".join([f"\\fB{_escaped(name)}\\fR", *more, *takes])
    return f".TP\n{usage}\n{_prose(command.help or '')}" + (
        f".RS\n{_listed(own)}.RE\n" if own else ""
    )


def _argument(argument: click.Argument) -> str:
    return argument.metavar or f"{(argument.name or '').upper()}..."


def _shared_options() -> list[click.Option]:
    """Return the options that `simulate` and `compare` have and few other verbs."""
    simulate, compare = (command for name, command in verbs() if name in ("simulate", "compare"))
    known = {identity(o) for o in (*common_options(), *options(compare))}
    common = {identity(o) for o in common_options()}
    return [o for o in options(simulate) if identity(o) in known - common]


def _options(names: list[str]) -> str:
    """Return the options of a program; for selastic also those that several verbs share."""
    if names == ["esrun"]:
        return "".join(_option(flags, text) for flags, text in _esrun_options())
    command = daemon.main if names == ["selasticd"] else main.selastic
    listed = options(command) if names == ["selasticd"] else [*options(command), *common_options()]
    return _listed(listed)


def _listed(options_: list[click.Option]) -> str:
    return "".join(_option(_flags(o), _described(o)) for o in options_)


def _described(option: click.Option) -> str:
    value = f"{option.default:g}" if isinstance(option.default, float) else option.default
    default = f" By default {value}." if option.show_default else ""
    variable = (
        f" The environment variable `{option.envvar}` does the same." if option.envvar else ""
    )
    return f"{option.help}{default}{variable}"


def _esrun_options() -> Iterator[tuple[str, str]]:
    """Yield flags and description of each option in esrun's help."""
    pattern = r"^  (-\S.*?)  +(\S.*(?:\n {8,}\S.*)*)"
    for flags, text in re.findall(pattern, esrun_options.HELP, re.MULTILINE):
        described = " ".join(text.split()).replace(" (see `man esrun`)", "")
        yield flags, described[0].upper() + described[1:].rstrip(".") + "."


def _flags(option: click.Option) -> str:
    value = value_name(option)
    optional = option._flag_needs_value  # noqa: SLF001 - click has no name for it
    shown = f" [{value}]" if value and optional else f" {value}" if value else ""
    return ", ".join(option.opts) + shown


def _option(flags: str, text: str) -> str:
    """Return one option: `-o, --option VALUE` and its description."""
    match = re.fullmatch(r"((?:-\S+, )*-\S+)(?: (.+))?", flags)
    names, value = (match[1], match[2]) if match else (flags, None)
    bold = ", ".join(f"\\fB{_escaped(n)}\\fR" for n in names.split(", "))
    shown = f"{bold} \\fI{_escaped(value)}\\fR" if value else bold
    return f".TP\n{shown}\n{_lines(text)}"


def _prose(text: str) -> str:
    """Return the paragraphs of a docstring."""
    return ".IP\n".join(_lines(paragraph) for paragraph in text.split("\n\n"))


def _lines(text: str) -> str:
    joined = " ".join(text.split())
    return "".join(f"{_roff(one)}\n" for one in _SENTENCE.split(joined) if one)


def _keys() -> str:
    """Return each section of elastic.toml with its keys."""
    parts = []
    for section, title, keys in documentation.sections():
        parts.append(f".SH [{section}]\n{_roff(title[:1].upper() + title[1:])}.\n")
        for key in keys:
            parts.append(f".TP\n\\fB{key.name}\\fR = {_escaped(key.default)}\n")
            parts += [_lines(text) for text in (key.description, key.permitted)]
    return "".join(parts)


def _roff(text: str) -> str:
    """Return text for roff, `words` in bold."""
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", _escaped(text))
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _escaped(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("…", "...")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
