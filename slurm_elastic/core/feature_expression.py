"""Constraints to features of nodes (`sbatch --constraint`), as Slurm reads them.

Without parentheses, which cannot be nested, Slurm evaluates from left to right:

>>> expression = FeatureExpression.parse("(a100|h100)&ib")
>>> expression.matches({"h100", "ib"}), expression.matches({"h100"})
(True, False)

With brackets all nodes of a job have the same one of several features:

>>> alternatives("ib&[rack1|rack2]")
('ib&rack1', 'ib&rack2')

Numbers of nodes (`[a*2&b*1]`) are not supported.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

_NAME = r"[\w.:-]+"
_NAMES = rf"{_NAME}(?:[&,|]{_NAME})*"
_TERM = rf"(?:{_NAME}|\({_NAMES}\))"
_EXPRESSION = re.compile(rf"{_TERM}(?:[&,|]{_TERM})*", re.ASCII)
_ONE_TERM = re.compile(rf"([&,|]?)(?:({_NAME})|\(([^()]*)\))", re.ASCII)
_BRACKETS = re.compile(rf"\[({_NAME}(?:\|{_NAME})*)\]", re.ASCII)
#: Constraints that Slurm stores are no longer.
_MOST_BYTES = 1024
#: Each alternative of a pending job is looked at (our choice).
_MOST_ALTERNATIVES = 16


@dataclass(frozen=True, slots=True)
class FeatureExpression:
    """Condition on the features of one node; `&` and `|` from left to right.

    Attributes:
        terms: operator before each term ("" for the first one), and a name or an expression.
    """

    terms: tuple[tuple[str, str | FeatureExpression], ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> FeatureExpression | None:
        """Return the expression in a text; None if it is more than names, `&`, `|` and `()`."""
        text = text.strip()
        if not text:
            return cls(())
        if len(text) > _MOST_BYTES or not _EXPRESSION.fullmatch(text):
            return None
        return cls._of(text)

    @classmethod
    def _of(cls, text: str) -> FeatureExpression:
        return cls(
            tuple(
                (operator.replace(",", "&"), name or cls._of(group))
                for operator, name, group in _ONE_TERM.findall(text)
            )
        )

    def matches(self, features: Set[str]) -> bool:
        """Return whether a node with these features fulfils it."""
        fulfilled = True
        for operator, term in self.terms:
            value = term in features if isinstance(term, str) else term.matches(features)
            fulfilled = fulfilled or value if operator == "|" else fulfilled and value
        return fulfilled


@lru_cache(maxsize=4096)
def alternatives(text: str) -> tuple[str, ...]:
    """Return the constraints of which all nodes of a job have to fulfil the same one.

    This is the text itself without brackets, and where it is too complex: it has no expression
    then.
    """
    brackets = _BRACKETS.findall(text) if len(text) <= _MOST_BYTES else []
    names = tuple(dict.fromkeys(brackets[0].split("|"))) if len(brackets) == 1 else ()
    if not 0 < len(names) <= _MOST_ALTERNATIVES:
        return (text,)
    return tuple(_BRACKETS.sub(name, text) for name in names)
