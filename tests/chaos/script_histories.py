"""Histories of unmodified scripts: what was resumed from, and what was lost. Pure.

drivers/saver.py appends its rows to the output of its job, to which esrun logs its answers to
notices. So both are in one order, and no clocks are compared. An answer *stands* until its notice
is withdrawn. An attempt with a standing answer was ended by a change of the controller; or by a
fault after it, which must not cost more. Anything else that ends an attempt is a fault.

When Slurm ends a job it continues stopped ranks (SIGCONT) before its SIGTERM; until esrun's guards
stop them again they run. Rows after Slurm's line on the end of the job are of this moment. A save
that is begun in it is cut; these are counted, and break no rule (docs/reliability-defects.md). The
row of a save follows its first byte: after the last step before a save it may have begun without
a row.

| rule | broken when |
|---|---|
| resume | a start does not resume from the newest complete checkpoint |
| torn | it reads a torn one that no fault has left: of `rename` always, else after an answer |
| frozen | the script computes on after its answer, and no fault kept the ranks from being stopped |
| judged | a script that resumes is taken for one that does not, or the other way round |
| asked | a script that does not resume gets a notice after that was shown |
| anew | a script that does not resume ended without all of its steps in its last run |
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

#: Manners of drivers/saver.py.
MANNERS = ("rename", "place", "folder", "anew")
#: Steps between two saves of drivers/saver.py.
_SAVE_EVERY = 10
#: Rows after an answer that show nothing: Slurm logs the end of a job while it continues the ranks,
#: and esrun that they go on when they have been continued.
_LATE_ROWS = 2

_ANSWER = re.compile(r"esrun: notice (\d+): .* is complete$")
_NOTICE = re.compile(r"esrun: notice (\d+): .* checkpoint$")
_WITHDRAWN = re.compile(r"esrun: notice (\d+)(?: is withdrawn|: no requeue within)")
_ENDING = re.compile(r"slurmstepd-\S+: error: \*\*\* (?:JOB|STEP) .* CANCELLED AT ")
_KEPT = re.compile(r"esrun: rehearsal: .* (?:is|are) kept in ")
_PUT_BACK = re.compile(r"esrun: rehearsal: .* is put back as it was before the restart")
_REFUTED = "it does not resume, and will not be resized"
_PROVEN = "esrun: resumed: the script has read its newest checkpoint"


class SaverFault(NamedTuple):
    """A broken rule, and how it was broken."""

    rule: str
    text: str


@dataclass
class SaverAttempt:
    """One start of a script.

    Attributes:
        identity: of the start.
        resumed_from: step of the checkpoint that it has read; 0: none.
        torn: steps of torn checkpoints that it has found; -1: of unknown step.
        world: number of ranks.
        steps: computed, in this order.
        saves: of each begun save: step → whether it was completed.
        put_back: step of the checkpoint that esrun has put back before it, as the attempt before
            failed, or esrun was killed, before one of its saves was shown to be complete; or None.
        late: times of the rows since the standing answer, until Slurm ends the job.
        begun_at_end: steps of the saves that were begun after that.
        answered: whether an answer stands.
        ending: whether Slurm ends the job since then.
        finished: whether it has done all steps.
    """

    identity: str
    resumed_from: int
    torn: tuple[int, ...]
    world: int
    put_back: int | None = None
    steps: list[int] = field(default_factory=list)
    saves: dict[int, bool] = field(default_factory=dict)
    late: list[float] = field(default_factory=list)
    begun_at_end: set[int] = field(default_factory=set)
    answered: bool = False
    ending: bool = False
    finished: bool = False

    @property
    def cut_at_end(self) -> int:
        """Number of saves that were begun while Slurm ended the job, and cut by that."""
        if not self.answered:
            return 0
        cut = sum(not self.saves[step] for step in self.begun_at_end)
        return cut + (self.save_without_row is not None)

    @property
    def save_without_row(self) -> int | None:
        """Step of a save that may have begun when the script was killed before the save's row.

        esrun would have seen it before an answer: the script was killed while nothing stopped it,
        by a fault or while Slurm ended the job.
        """
        step = self.steps[-1] if self.steps else 1
        return step if step % _SAVE_EVERY == 0 and step not in self.saves else None

    @property
    def computes_on(self) -> bool:
        """Whether it computes although an answer stands."""
        return self.answered and len(self.late) > _LATE_ROWS


@dataclass
class SaverHistory:
    """Log of one script.

    Attributes:
        attempts: in the order of their starts.
        answers: numbers of the notices that esrun has answered.
        asked_after_refuted: numbers of the notices that came after it had shown not to resume.
        proven, refuted: what restarts have shown.
        interleaved: whether an attempt went on when the next had begun: Slurm ran it twice, or
            it was submitted twice, as sbatch had got no answer.
    """

    attempts: list[SaverAttempt] = field(default_factory=list)
    answers: set[int] = field(default_factory=set)
    asked_after_refuted: list[int] = field(default_factory=list)
    proven: bool = False
    refuted: bool = False
    interleaved: bool = False
    _kept: int | None = None
    _put_back: int | None = None

    @classmethod
    def read(cls, lines: Iterable[str]) -> SaverHistory:
        """Read the output of a job."""
        history = cls()
        for line in lines:
            if line.startswith("{"):
                history._row(line)
            else:
                history._line(line)
        return history

    def _row(self, line: str) -> None:
        try:
            row: Mapping[str, Any] = json.loads(line)
            identity, at = row["attempt"], float(row["at"])
        except (ValueError, KeyError, TypeError):
            return  # cut off by a kill
        if "start" in row:
            torn = tuple(row["torn"])
            attempt = SaverAttempt(identity, row["start"], torn, row["world"], self._put_back)
            self.attempts.append(attempt)
            self._put_back = None
            return
        attempt = self.attempts[-1] if self.attempts else None
        if attempt is None or attempt.identity != identity:
            self.interleaved = True
            return
        if attempt.answered and not attempt.ending:
            attempt.late.append(at)
        if "step" in row:
            attempt.steps.append(row["step"])
        elif "save" in row:
            attempt.saves[row["save"]] = False
            if attempt.ending:
                attempt.begun_at_end.add(row["save"])
        elif "saved" in row:
            attempt.saves[row["saved"]] = True
        elif "finished" in row:
            attempt.finished = True

    def _line(self, line: str) -> None:
        attempt = self.attempts[-1] if self.attempts else None
        if found := _ANSWER.match(line):
            self.answers.add(int(found[1]))
            if attempt is not None:
                attempt.answered, attempt.ending = True, False
                attempt.late, attempt.begun_at_end = [], set()
        elif _ENDING.match(line) and attempt is not None:
            attempt.ending = attempt.answered
        elif _WITHDRAWN.match(line) and attempt is not None:
            attempt.answered = False
        elif found := _NOTICE.match(line):
            if self.refuted:
                self.asked_after_refuted.append(int(found[1]))
        elif _KEPT.match(line) and attempt is not None:
            self._kept = max((s for s, done in attempt.saves.items() if done), default=None)
        elif _PUT_BACK.match(line):
            self._put_back = self._kept
        elif _REFUTED in line:
            self.refuted = True
        elif line.startswith(_PROVEN):
            self.proven = True


class LostSteps(NamedTuple):
    """Steps computed again, one number for each restart: after changes, and after faults."""

    by_changes: list[int]
    by_faults: list[int]


def lost_steps(history: SaverHistory) -> LostSteps:
    """Return the steps that each restart of a script had to compute again."""
    lost = LostSteps([], [])
    for earlier, later in zip(history.attempts, history.attempts[1:], strict=False):
        reached = max(earlier.steps, default=earlier.resumed_from)
        kind = lost.by_changes if earlier.answered else lost.by_faults
        kind.append(max(0, reached - later.resumed_from))
    return lost


def without_hindered(history: SaverHistory, hindered: Callable[[float], bool]) -> SaverHistory:
    """Return a history in which no answer stands whose ranks a fault kept from being stopped.

    Args:
        history: of a script.
        hindered: whether a fault may keep ranks from being stopped at this time (epoch s).
    """
    attempts = [
        replace(attempt, answered=False)
        if attempt.computes_on and hindered(attempt.late[0])
        else attempt
        for attempt in history.attempts
    ]
    return replace(history, attempts=attempts)


def saver_faults(history: SaverHistory, manner: str, *, last: int, ended: bool) -> list[SaverFault]:
    """Return the rules that a script's history breaks.

    Args:
        history: of the script.
        manner: one of `MANNERS`.
        last: steps of the whole training.
        ended: whether it says that it was through.
    """
    broken: list[SaverFault] = []
    for attempt in history.attempts:
        if attempt.computes_on:
            text = f"{len(attempt.late)} rows after its answer, the first at {attempt.late[0]}"
            broken.append(SaverFault("frozen", f"{_name(history, attempt)}: {text}"))
    if manner == "anew":
        return broken + _of_anew(history, last=last, ended=ended)
    if history.refuted:
        broken.append(SaverFault("judged", "it resumes, and is taken for one that does not"))
    newest, torn = 0, _Torn(manner)
    for number, attempt in enumerate(history.attempts):
        if number:
            broken += _of_start(history, number, newest, torn)
        newest = attempt.resumed_from
        for step, completed in attempt.saves.items():
            cut_by_fault = not attempt.answered or step in attempt.begun_at_end
            torn.record(step, completed=completed, by_fault=cut_by_fault)
            newest = step if completed else newest
        if attempt.save_without_row is not None:
            torn.record(attempt.save_without_row, completed=False, by_fault=True)
    if ended and not any(attempt.finished for attempt in history.attempts):
        broken.append(SaverFault("resume", f"it ended without its {last} steps"))
    return broken


class _Torn:
    """Saves that were begun and not completed, and whether a fault has cut them."""

    def __init__(self, manner: str) -> None:
        self.manner = manner
        self.by_fault: dict[int, bool] = {}

    def record(self, step: int, *, completed: bool, by_fault: bool) -> None:
        if completed or self.manner == "place":
            # The one file, or the directory of the step, is written anew.
            self.by_fault = (
                {k: v for k, v in self.by_fault.items() if k != step}
                if self.manner == "folder"
                else {}
            )
        if not completed:
            self.by_fault[step] = by_fault

    def allows(self, step: int) -> bool:
        """Return whether a fault may have left a torn checkpoint of this step (-1: of any)."""
        if self.manner == "rename":
            return False
        return any(self.by_fault.values()) if step < 0 else self.by_fault.get(step, False)


def _of_start(history: SaverHistory, number: int, newest: int, torn: _Torn) -> list[SaverFault]:
    attempt = history.attempts[number]
    broken = [
        SaverFault("torn", f"{_name(history, attempt)}: its checkpoint (step {step}) is torn")
        for step in attempt.torn
        if not torn.allows(step)
    ]
    start = attempt.resumed_from
    # A save may be complete, and its row not written any more.
    expected: set[int | None] = {newest, *torn.by_fault, attempt.put_back}
    if attempt.torn and torn.manner == "place" and not broken:
        expected = {0}  # the only one
    if start not in expected and not broken:
        text = f"it resumed from step {start}, the newest complete checkpoint is of {newest}"
        broken.append(SaverFault("resume", f"{_name(history, attempt)}: {text}"))
    return broken


def _of_anew(history: SaverHistory, *, last: int, ended: bool) -> list[SaverFault]:
    broken = []
    if history.asked_after_refuted:
        numbers = ", ".join(map(str, history.asked_after_refuted))
        broken.append(SaverFault("asked", f"notice {numbers} after it had shown not to resume"))
    finished = [attempt for attempt in history.attempts if attempt.finished]
    if ended and not finished:
        broken.append(SaverFault("anew", "it ended, and no run of it has finished"))
    for attempt in finished[-1:]:
        if attempt.steps != list(range(1, last + 1)):
            text = f"its last run has {len(attempt.steps)} steps, not 1 to {last}"
            broken.append(SaverFault("anew", f"{_name(history, attempt)}: {text}"))
    if history.proven:
        broken.append(SaverFault("judged", "it starts anew, and is taken for one that resumes"))
    return broken


def _name(history: SaverHistory, attempt: SaverAttempt) -> str:
    return f"start {history.attempts.index(attempt) + 1}"


_STATE = re.compile(r"JobId=(\S+) Transition=(\d+) State=(NOTIFY|REQUEUE)\b|selasticd \S+ (Mode)=")


def requeued_after_notice(log: str) -> dict[str, set[int]]:
    """Return the notices of each job that selasticd has requeued after one, from its log.

    What it had begun before it was last started is left out: it may have a new ledger, which
    numbers from 1 again.
    """
    asked: set[tuple[str, int]] = set()
    requeued: dict[str, set[int]] = defaultdict(set)
    for found in _STATE.finditer(log):
        if found[4]:
            asked.clear()
        elif found[3] == "NOTIFY":
            asked.add((found[1], int(found[2])))
        elif (found[1], int(found[2])) in asked:
            requeued[found[1]].add(int(found[2]))
    return dict(requeued)
