"""Knowledge of a script's saves that is kept over the restarts of its job (docs/adr/0014).

The files of a save count only for the pattern of checkpoints, and the number of ranks and hosts,
with which they were seen: more ranks may write more files. All else is learned anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Names that are kept for one world (our choice): a script with more is learned anew.
_MOST_NAMES = 1000
#: Worlds, and patterns, that are kept.
_MOST_WORLDS, _MOST_PATTERNS = 64, 8

#: A name without its numbers, and how many files have it.
NameCounts = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class SaveFiles:
    """Files of which each save consists.

    Attributes:
        shape: of the checkpoints of a save.
        counting_fields: positions of the numbers in names that rise with each save; None: no save
            was told from the one before by its name.
        contents: name of a directory → files in it.
        lacking: names of directories of a known format whose last file the script never writes.
    """

    shape: NameCounts
    counting_fields: frozenset[int] | None = None
    contents: Mapping[str, NameCounts] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()

    @property
    def is_small(self) -> bool:
        """Whether it has few enough names to be kept."""
        return len(self.shape) + sum(map(len, self.contents.values())) <= _MOST_NAMES

    def to_body(self) -> dict[str, Any]:
        """Return its JSON object."""
        counting = None if self.counting_fields is None else sorted(self.counting_fields)
        return {
            "shape": self.shape,
            "counting": counting,
            "contents": dict(self.contents),
            "lacking": self.lacking,
        }

    @classmethod
    def of(cls, body: Any) -> SaveFiles:
        """Return it from its JSON object.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is invalid.
        """
        counting = body["counting"]
        return cls(
            shape=_counts(body["shape"]),
            counting_fields=None if counting is None else frozenset(map(_natural, counting)),
            contents={_text(name): _counts(rows) for name, rows in body["contents"].items()},
            lacking=tuple(map(_text, body.get("lacking", ()))),
        )


@dataclass(kw_only=True)
class LearnedSaves:
    """Properties of the saves of one pattern, learned from the attempts of a job.

    Attributes:
        pattern: of the checkpoints.
        complete: pattern of their marker; None: the script writes none.
        pause_s: longest pause inside a save (`settle_time`); None: not known.
        files: by ranks and hosts.
    """

    pattern: str
    complete: str | None = None
    pause_s: float | None = None
    files: dict[str, SaveFiles] = field(default_factory=dict)

    def record(self, world: str, files: SaveFiles | None) -> None:
        """Record the files of a save; None: nothing is known of this world any more."""
        self.files.pop(world, None)
        if files is not None and files.is_small:
            self.files[world] = files
            for oldest in list(self.files)[:-_MOST_WORLDS]:
                del self.files[oldest]

    def to_body(self) -> dict[str, Any]:
        """Return its JSON object."""
        files = {world: files.to_body() for world, files in self.files.items()}
        return {**vars(self), "files": files}

    @classmethod
    def of(cls, body: Any) -> LearnedSaves:
        """Return it from its JSON object.

        Raises:
            ValueError, TypeError, KeyError, AttributeError: it is invalid.
        """
        complete, pause_s = body["complete"], body["pause_s"]
        return cls(
            pattern=_text(body["pattern"]),
            complete=None if complete is None else _text(complete),
            pause_s=None if pause_s is None else _seconds(pause_s),
            files={_text(world): SaveFiles.of(row) for world, row in body["files"].items()},
        )


def learned_saves(body: object) -> list[LearnedSaves]:
    """Return the knowledge of all patterns from JSON; what is invalid is left out."""
    learned = []
    for row in body if isinstance(body, list) else []:
        try:
            learned.append(LearnedSaves.of(row))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    return learned


def select(learned: list[LearnedSaves], pattern: str, complete: str | None) -> LearnedSaves:
    """Return the knowledge of one pattern, which becomes the last of the list; new without any."""
    same = [row for row in learned if (row.pattern, row.complete) == (pattern, complete)]
    selected = same[0] if same else LearnedSaves(pattern=pattern, complete=complete)
    others = [row for row in learned if all(row is not other for other in same)]
    learned[:] = [*others[-_MOST_PATTERNS + 1 :], selected]
    return selected


def _counts(rows: Any) -> NameCounts:
    return tuple(sorted((_text(name), _natural(count)) for name, count in rows))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("no whole number")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError("no time")
    return float(value)
