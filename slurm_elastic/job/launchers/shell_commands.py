"""Simple commands in shell text, without running a shell."""

from __future__ import annotations

import re

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
