"""Completion of selastic for bash."""

from __future__ import annotations

import click

from contrib.generate.definitions import (
    TEMPLATES,
    arguments,
    groups,
    options,
    takes_file,
    value_name,
    verbs,
)
from slurm_elastic.cli import main


def script() -> str:
    """Return the completion script."""
    parts = {
        "@global-values": _global_values(),
        "@groups": _groups(),
        "@values": _values(),
        "@words": _words(),
    }
    lines = (TEMPLATES / "selastic.bash").read_text("utf-8").splitlines()
    return "".join(f"{parts.get(line.strip(), line)}\n" for line in lines)


def _commands() -> list[tuple[str, click.Command]]:
    return [("", main.selastic), *verbs()]


def _global_values() -> str:
    names = [name for o in options(main.selastic) if value_name(o) for name in o.opts]
    return f"            {' | '.join(names)}) ((i++)) ;;"


def _groups() -> str:
    return "\n".join(
        f'        {name}) if ((i + 1 < COMP_CWORD)); then verb+=" ${{COMP_WORDS[i+1]}}"; fi ;;'
        for name in groups()
    )


def _values() -> str:
    """Return one branch for each way to complete an option's value."""
    branches: dict[str, list[str]] = {}
    for verb, command in _commands():
        for option in options(command):
            if value_name(option) and not option._flag_needs_value:  # noqa: SLF001 - click has no name for it
                patterns = [f"'{verb} {name}'" for name in option.opts]
                branches.setdefault(_reply(option), []).extend(patterns)
    return "\n".join(
        f"        {' | '.join(patterns)})\n            {reply}\n            return ;;"
        for reply, patterns in branches.items()
    )


def _reply(option: click.Option) -> str:
    if isinstance(option.type, click.Choice):
        choices = " ".join(option.type.choices)
        return f"mapfile -t COMPREPLY < <(compgen -W '{choices}' -- \"$current\")"
    if "--user" in option.opts:
        return 'mapfile -t COMPREPLY < <(compgen -u -- "$current")'
    return "compopt -o default" if takes_file(value_name(option)) else ":"


def _words() -> str:
    branches = []
    for verb, command in _commands():
        names = [n for o in options(command) for n in o.opts if n.startswith("--")]
        branches.append(
            f"        '{verb}') options='{' '.join([*names, '--help'])}'\n"
            f"            arguments='{_arguments(verb, command)}' ;;"
        )
    for verb, inner in groups().items():
        branches.append(
            f"        {verb}) options='--help'\n            arguments='{' '.join(inner)}' ;;"
        )
    return "\n".join(branches)


def _arguments(verb: str, command: click.Command) -> str:
    if not verb:
        return " ".join(dict.fromkeys(name.partition(" ")[0] for name, _ in verbs()))
    shown = " ".join(a.metavar or (a.name or "").upper() for a in arguments(command))
    words = ["job"] if "[job]" in shown else []
    words += ["@jobs"] if "JOBID" in shown else []
    return " ".join([*words, *(["@files"] if takes_file(shown) else [])])
