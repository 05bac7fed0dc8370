"""Division of changes of checkpoints into saves, and the decision that a save is over.

A save may change several checkpoints (`model.pt` and `optimizer.pt`). It is over when nothing has
changed for the settle time. Where saves follow each other too closely for that, it is over at its
last byte, once earlier saves with as many ranks have shown which files it consists of.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from typing import NamedTuple

from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import Evidence
from slurm_elastic.job.unmodified.checkpoints.learned_saves import SaveFiles
from slurm_elastic.job.unmodified.checkpoints.settle_time import (
    LACKING_S,
    LEAST_S,
    LONGEST_PAUSE_S,
    SettleTime,
)

#: Weight of the ways in which earlier saves have ended; from `_TRUSTED` on their files are known:
#: after one save that has settled, two that overwrite the same files, or three with counting names.
_SETTLED, _OVERWRITTEN, _COUNTED, _TRUSTED = 6, 3, 2, 6
#: Two saves that a late scan has found together do not count if so many times as much weight shows
#: that they are two (our choice).
_OUTWEIGHED = 3
#: A file of unknown format that is rewritten after so many seconds belongs to the next save.
_FILE_QUIET_S = 1.0
_NUMBER = re.compile(r"\d+")
#: A number, or a part of a hash; one or two letters before a number (`ba1000`) are none.
_VARIABLE = re.compile(
    r"(?<![0-9a-zA-Z])(?![a-f]{1,2}\d+(?![0-9a-zA-Z]))(?=[0-9a-f]*\d)[0-9a-f]{6,}(?![0-9a-zA-Z])|\d+"
)
#: Names with such words number the parts of one save. In them only numbers after one of
#: `_COUNTER` count saves.
_PART = re.compile(
    r"(?<![a-z])(?:rank|shard|part|proc|worker|host|node|gpu|device|local|layer|zero"
    r"|(?:mp|pp|tp|dp|ep)_)|-of-",
    re.IGNORECASE,
)
_COUNTER = re.compile(
    r"(?:epoch|step|iter|(?<![a-z])(?:ep|ba|batch|iteration|update|checkpoint|ckpt))[=_-]?$",
    re.IGNORECASE,
)


def without_numbers(name: str) -> str:
    """Return a name with `#` for each number or hash, so that names of several saves are equal.

    >>> without_numbers("step_100/rank0.pt")
    'step_#/rank#.pt'
    """
    return _VARIABLE.sub("#", name)


#: Names of the files of a save without their numbers, and how many files have each.
_Shape = tuple[tuple[str, int], ...]


class ChangeKind(Enum):
    """Kinds of changes of a checkpoint since the last scan."""

    #: A new checkpoint.
    NEW = auto()
    #: Something was added; what was there has not changed.
    GROWN = auto()
    #: Some of it was written anew.
    REWRITTEN = auto()


class FinishedSave(NamedTuple):
    """A save that is over.

    Attributes:
        paths: of its checkpoints that still exist as it wrote them.
        number: of saves; rises.
        lacks: the next save has begun, and the last file of a known format is missing: it is not
            shown to be complete, but tells what the script writes.
    """

    paths: tuple[str, ...]
    number: int
    lacks: bool = False


@dataclass
class _Member:
    changed_at: float
    is_directory: bool
    evidence: Evidence = Evidence.CUT


@dataclass
class _Save:
    number: int
    changed_at: float
    members: dict[str, _Member] = field(default_factory=dict)
    pause_s: float = 0.0
    is_early: bool = False

    def shape(self) -> _Shape:
        return _shape(self.members)

    def finished(self) -> FinishedSave:
        return FinishedSave(tuple(self.members), self.number)


class SaveTracker:
    """Tracker of the saves of one script.

    Args:
        settle: its settle time; learns.
        trusts_evidence: a checkpoint that is WHOLE is complete by itself: the script marks it.
    """

    def __init__(self, settle: SettleTime, *, trusts_evidence: bool = False) -> None:
        self._settle = settle
        self._trusts_evidence = trusts_evidence
        self._number = 0
        self.begin_attempt()

    def begin_attempt(self, known: SaveFiles | None = None) -> None:
        """Forget saves under way, and what saves consist of: more ranks may write more files.

        Args:
            known: files of each save, from an earlier attempt with as many ranks; None: not known.
        """
        self._open: _Save | None = None
        self._last: _Save | None = None
        self._overtaken: list[_Save] = []
        self._weights: Counter[_Shape] = Counter()
        self._early_was_wrong = False
        #: Positions of the numbers in names that have risen with each save.
        self._counting_fields: set[int] | None = None
        #: Shapes of saves that may be several, found together, with the shape of each of those.
        self._divided: dict[_Shape, _Shape] = {}
        #: Whether all that is known of the files is from earlier attempts.
        self._is_inherited = known is not None
        self._unconfirmed_at: float | None = None
        if known is not None:
            self._weights[known.shape] = _TRUSTED
            if known.counting_fields is not None:
                self._counting_fields = set(known.counting_fields)

    def is_confirmed(self, now: float) -> bool:
        """Return whether the newest save is shown to be over by this attempt itself.

        The first save that ends at its last byte, by what an earlier attempt has shown, is not:
        until the settle time has passed, or another save of the same files is over.
        """
        at = self._unconfirmed_at
        return at is None or now - at >= self._settle.seconds()

    @property
    def known(self) -> SaveFiles | None:
        """The files of each save, if all saves of the attempt were of the same; else None."""
        if self.is_contradicted or max(self._weights.values(), default=0) < _TRUSTED:
            return None
        (shape,) = self._weights
        counting = self._counting_fields
        return SaveFiles(
            shape=shape, counting_fields=None if counting is None else frozenset(counting)
        )

    @property
    def is_contradicted(self) -> bool:
        """Whether saves differed, or one went on after its last byte."""
        return len(self._weights) > 1 or self._early_was_wrong

    @property
    def begun(self) -> int:
        """Number of the newest save that has begun."""
        return self._number

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that is not shown to be over."""
        return self._open is not None

    def change(self, path: str, kind: ChangeKind, now: float, *, is_directory: bool) -> None:
        """Record that a checkpoint has changed."""
        save = self._open
        if save is not None and self._begins_next(save, path, kind, now):
            self._overtake(save)
            save.members.pop(path, None)  # it is not what that save wrote any more
            save = None
        if save is None:
            save = self._open = self._begin(path, kind, now)
        elif save.members:
            save.pause_s = max(save.pause_s, now - save.changed_at)
        save.changed_at = now
        save.members[path] = _Member(now, is_directory)

    def remove(self, path: str) -> None:
        """Record that a checkpoint is deleted, or being deleted."""
        save = self._open
        if save is not None and [*save.members] == [path]:
            if _weakest(save) is Evidence.WHOLE:
                self._overtake(save)  # a script deletes what it has written, not what it writes
            self._open = None
        for save in (self._open, self._last, *self._overtaken):
            if save is not None:
                save.members.pop(path, None)

    def finished(self, now: float, evidence: Callable[[str], Evidence]) -> list[FinishedSave]:
        """Return the saves that are over and were not returned before.

        Args:
            now: of this scan, as in `change`.
            evidence: of a checkpoint, as it is now.
        """
        over = []
        lacking = []
        for overtaken in self._overtaken:
            if _weakest(overtaken) is Evidence.LACKING:  # it may have been completed since
                _judge(overtaken, evidence)
            if _weakest(overtaken) >= Evidence.UNKNOWN:
                over.append(overtaken)
            elif _weakest(overtaken) is Evidence.LACKING:
                lacking.append(overtaken.finished()._replace(lacks=True))
        self._overtaken = []
        save = self._open
        if save is not None:
            _judge(save, evidence)
            self._drop_abandoned(save, now)
            if not save.members:
                self._open = None
            elif self._trusts_evidence:
                over += self._marked(save)
            elif _weakest(save) is Evidence.WHOLE and self._is_trusted(save):
                save.is_early = True
                self._unconfirmed_at = save.changed_at if self._is_inherited else None
                self._is_inherited = False
                over.append(self._close(save))
            elif self._is_settled(save, now):
                self._settle.learn(save.pause_s)
                self._weigh(save, _SETTLED)
                self._is_inherited, self._unconfirmed_at = False, None
                over.append(self._close(save))
        return [*lacking, *(save.finished() for save in over if save.members)]

    def _marked(self, save: _Save) -> list[_Save]:
        """Take the complete checkpoints out of a save."""
        whole = {p: m for p, m in save.members.items() if m.evidence is Evidence.WHOLE}
        if not whole:
            return []
        for path in whole:
            del save.members[path]
        if not save.members:
            self._open = None
        return [_Save(save.number, save.changed_at, whole)]

    def _begin(self, path: str, kind: ChangeKind, now: float) -> _Save:
        last = self._last
        if last is not None and path in last.members and kind is ChangeKind.GROWN:
            member = last.members[path]
            pause_s = now - last.changed_at
            if member.is_directory and pause_s <= LONGEST_PAUSE_S:
                # It was not over: the pause is one inside a save.
                self._settle.learn(pause_s)
                self._early_was_wrong = self._early_was_wrong or last.is_early
                return _Save(last.number, now, dict(last.members), pause_s)
        self._number += 1
        return _Save(self._number, now)

    def _begins_next(self, save: _Save, path: str, kind: ChangeKind, now: float) -> bool:
        """Return whether a change belongs to the next save: it repeats what this one has done."""
        member = save.members.get(path)
        if member is None:
            counts = kind is ChangeKind.NEW and _weakest(save) >= Evidence.LACKING
            return counts and any(self._counts_on(other, path) for other in save.members)
        if kind is not ChangeKind.REWRITTEN and (
            member.is_directory or member.evidence is not Evidence.WHOLE
        ):
            return False
        if member.evidence is not Evidence.UNKNOWN:
            return member.evidence is Evidence.WHOLE
        # Parts of a directory may be written twice in one save.
        return now - save.changed_at >= (LEAST_S if member.is_directory else _FILE_QUIET_S)

    def _counts_on(self, earlier: str, later: str) -> bool:
        """Return whether the numbers in two names are those of two saves, one after the other."""
        if _NUMBER.sub("#", earlier) != _NUMBER.sub("#", later):
            return False
        pairs = zip(_NUMBER.findall(earlier), _NUMBER.findall(later), strict=True)
        rising = {i for i, (old, new) in enumerate(pairs) if int(new[:18]) > int(old[:18])}
        if _PART.search(later.rpartition("/")[2]):
            before = [later[: match.start()] for match in _NUMBER.finditer(later)]
            rising = {i for i in rising if _COUNTER.search(before[i])}
        if self._counting_fields is not None:
            rising &= self._counting_fields
        if rising:
            self._counting_fields = rising
        return bool(rising)

    def _overtake(self, save: _Save) -> None:
        """Close a save because the next one has begun."""
        weight = _OVERWRITTEN if self._counting_fields is None else _COUNTED
        self._weigh(save, weight)
        if self._is_trusted(save) or all(m.is_directory for m in save.members.values()):
            self._settle.learn(save.pause_s)
        self._overtaken.append(save)
        self._last, self._open = save, None

    def _weigh(self, save: _Save, weight: int) -> None:
        """Count a save that is over among those of the same files."""
        shape = save.shape()
        self._weights[shape] += weight
        part = self._part(save)
        if part is not None:
            self._divided[shape] = part
        for whole, part in self._divided.items():
            if self._weights[part] >= _OUTWEIGHED * self._weights[whole]:
                del self._weights[whole]

    def _part(self, save: _Save) -> _Shape | None:
        """Return the shape of each of the saves that this one may be, found together; else None.

        Each has the same files, with higher numbers than the one before.
        """
        if not self._counting_fields:
            return None
        parts: dict[tuple[int, ...], list[str]] = {}
        for path in save.members:
            numbers = _NUMBER.findall(path)
            if len(numbers) <= max(self._counting_fields):
                return None
            counts = tuple(int(numbers[i][:18]) for i in sorted(self._counting_fields))
            parts.setdefault(counts, []).append(path)
        shapes = {_shape(paths) for paths in parts.values()}
        rises = all(
            new > old
            for earlier, later in pairwise(sorted(parts))
            for old, new in zip(earlier, later, strict=True)
        )
        return shapes.pop() if len(parts) > 1 and len(shapes) == 1 and rises else None

    def _close(self, save: _Save) -> _Save:
        self._last, self._open = save, None
        return save

    def _is_trusted(self, save: _Save) -> bool:
        """Return whether all earlier saves had the same files as this one."""
        weight = self._weights.get(save.shape(), 0)
        return len(self._weights) == 1 and weight >= _TRUSTED and not self._early_was_wrong

    def _is_part(self, save: _Save) -> bool:
        """Return whether all earlier saves had the files of this one, and others."""
        if len(self._weights) != 1:
            return False
        ((shape, weight),) = self._weights.items()
        own, known = Counter(dict(save.shape())), Counter(dict(shape))
        return weight >= _TRUSTED and own < known

    def _is_settled(self, save: _Save, now: float) -> bool:
        weakest = _weakest(save)
        if weakest < Evidence.LACKING:
            return False
        if self._is_part(save):
            weakest = Evidence.LACKING
        return now - save.changed_at >= self._settle.seconds(weakest)

    def _drop_abandoned(self, save: _Save, now: float) -> None:
        """Drop checkpoints that a failed save has left, when others have been written since."""
        patience_s = max(LACKING_S, 3 * self._settle.seconds())
        for path, member in list(save.members.items()):
            quiet_s = now - member.changed_at
            failed = quiet_s >= patience_s and member.changed_at < save.changed_at
            if (failed and member.evidence < Evidence.UNKNOWN) or (
                member.evidence is Evidence.EMPTY and quiet_s >= self._settle.seconds()
            ):
                del save.members[path]


def _shape(paths: Iterable[str]) -> _Shape:
    return tuple(sorted(Counter(map(without_numbers, paths)).items()))


def _judge(save: _Save, evidence: Callable[[str], Evidence]) -> None:
    for path, member in save.members.items():
        member.evidence = evidence(path)


def _weakest(save: _Save) -> Evidence:
    return min((member.evidence for member in save.members.values()), default=Evidence.CUT)
