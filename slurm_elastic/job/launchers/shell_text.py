"""Shell text in a command line (`bash -c TEXT`), and the simple commands in it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

SHELLS = frozenset(("sh", "bash", "dash", "ksh", "zsh"))
#: Commands that run the command in their arguments.
WRAPPERS = frozenset(
    """
    apptainer catchsegv ch-run chrt command conda docker enroot env exec hatch ionice mamba
    micromamba ncu nice nohup nsys numactl pdm pipenv pixi podman podman-hpc poetry pyenv sarus
    setsid shifter singularity stdbuf taskset time timeout uv uvx xvfb-run
    """.split()  # noqa: SIM905 - more readable than quoted names
)


def text_index(words: Sequence[str]) -> int | None:
    """Return the index of the text that a shell runs (`bash -c TEXT`); None without one."""
    for index, word in enumerate(words):
        name = base_name(word)
        if name in SHELLS:
            return _after_shell(words, index + 1)
        if index == 0 and name not in WRAPPERS:
            return None
    return None


def _after_shell(words: Sequence[str], index: int) -> int | None:
    while index < len(words) and words[index][:1] in ("-", "+"):
        option = words[index]
        if not option.startswith("--") and "c" in option:
            return index + 1 if index + 1 < len(words) else None
        index += 2 if option in ("-o", "+o", "-O", "+O", "--rcfile", "--init-file") else 1
    return None


#: A word with its place in the text.
_Token = tuple[str, int, int]

_TOKENS = re.compile(
    r"(?P<space>(?:[ \t]|\\\n)+)"
    r"|(?P<comment>(?<![^\s;&|(])#[^\n]*)"
    r"|(?P<redirection>\d*(?:<<<|<<|>>|[<>])(?:&\d*-?)?)"
    r"|(?P<operator>\n|[;&|(){}])"
    # Quotes, ${…}, $((…)), $(…) and `…` belong to the word around them.
    r"|(?P<word>(?:\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{[^}]*\}"
    r"|\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`|[^\s;&|()<>{}'\"\\`])+)"
    r"|(?P<other>.)",
    re.DOTALL,
)


def simple_commands(text: str) -> list[list[_Token]]:
    """Return the words of each simple command in shell text, quotes included."""
    commands: list[list[_Token]] = [[]]
    for match in _TOKENS.finditer(text):
        if match.lastgroup == "word":
            commands[-1].append((match[0], match.start(), match.end()))
        elif match.lastgroup == "operator":
            commands.append([])
    return [command for command in commands if command]


def unquoted(word: str) -> str:
    """Return a word of shell text without its quotes; variables in it stay."""
    return re.sub(r"\\(.)|['\"]", r"\1", word)


def base_name(path: str) -> str:
    """Return the last component of a path."""
    return Path(path).name
