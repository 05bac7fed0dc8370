"""Comparison of an interrupted training with an undisturbed one. Pure.

docs/examples/train_library.py writes, per step and rank, the samples it has trained on, and per
step the loss. Which samples a step takes does not depend on the number of ranks; so every step of
every attempt has to equal the undisturbed run's, and all steps have to be there. A step that was
computed again after a kill was lost in between: these are counted, they are no fault.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Sums of floats in another order.
TOLERANCE = 1e-4


Attempt = tuple[int, int]
_MEMBER_LOST = re.compile(r"continues after step (\d+) with \d+ rank\(s\) \(.*\d lost")


@dataclass
class History:
    """Logs of one training.

    Attributes:
        samples: (step, attempt) → samples, as often as they were trained on.
        losses: (step, attempt) → loss.
        members_lost: steps after which the others have gone on without a member.

    An attempt is (SLURM_RESTART_COUNT, how many had that number before): a slurmctld that forgets
    its last seconds counts one twice.
    """

    samples: dict[tuple[int, Attempt], Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    losses: dict[tuple[int, Attempt], float] = field(default_factory=dict)
    members_lost: set[int] = field(default_factory=set)

    @classmethod
    def read(
        cls, samples: Iterable[Iterable[str]], losses: Iterable[str], log: str = ""
    ) -> History:
        """Read the lines of each of samples-rank*.jsonl, of losses.jsonl, and the job's log."""
        history = cls(members_lost={int(step) for step in _MEMBER_LOST.findall(log)})
        for rank in samples:
            for attempt, row in _numbered(rank):
                history.samples[row["step"], attempt].update(row["indices"])
        for attempt, row in _numbered(losses):
            history.losses[row["step"], attempt] = row["loss"]
        return history

    @property
    def steps(self) -> set[int]:
        """Steps that an attempt has computed on all ranks, as far as the logs show."""
        return {step for step, _ in self.losses}

    def lost_steps(self) -> int:
        """Return the number of repeated computations of steps."""
        return len(self.losses) - len(self.steps)


def _rows(lines: Iterable[str]) -> Iterable[Mapping[str, Any]]:
    """Yield parsed lines; a kill may have cut a line, whose step was then not finished."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _numbered(lines: Iterable[str]) -> Iterable[tuple[Attempt, Mapping[str, Any]]]:
    """Yield each row of one file with its attempt: a repeated step belongs to another attempt."""
    counts: Counter[tuple[int, int]] = Counter()
    for row in _rows(lines):
        key = row["step"], row["run"]
        yield (row["run"], counts[key]), row
        counts[key] += 1


def faults(mine: History, reference: History, *, ended: bool) -> list[str]:
    """Return the differences from the undisturbed run.

    A rank writes its samples when the step is done: one that is killed in that moment leaves an
    attempt whose last step has a loss, and not all samples. A companion's rank that is killed
    leaves that in the middle of an attempt, or samples of a step that the others computed again.

    Args:
        mine: the interrupted one.
        reference: the undisturbed one.
        ended: whether it said that it was through; else steps may be missing at the end.
    """
    expected = {step: counts for (step, _), counts in reference.samples.items()}
    losses = {step: loss for (step, _), loss in reference.losses.items()}
    last_of: dict[Attempt, int] = {}
    for step, attempt in mine.losses:
        last_of[attempt] = max(step, last_of.get(attempt, 0))
    if ended and last_of:
        del last_of[max(last_of)]  # that attempt was not killed
    differences = []
    for (step, attempt), counts in sorted(mine.samples.items()):
        who = f"step {step} of attempt {attempt[0]}"
        want = expected.get(step, Counter())
        if step in mine.members_lost or step - 1 in mine.members_lost:
            continue
        if counts - want:
            differences.append(f"{who} has samples that it should not have")
        elif (step, attempt) in mine.losses and counts != want and last_of.get(attempt) != step:
            last = f"the attempt's last step is {last_of.get(attempt, 'the last')}"
            differences.append(f"{who} lacks {(want - counts).total()} samples; {last}")
    for (step, attempt), loss in sorted(mine.losses.items()):
        who = f"step {step} of attempt {attempt[0]}"
        if abs(loss - losses.get(step, float("nan"))) > TOLERANCE or step not in losses:
            differences.append(f"{who}: loss {loss}, not {losses.get(step)}")
    last = max(losses) if ended else max(mine.steps, default=0)
    missing = sorted(set(range(1, last + 1)) - mine.steps)
    if missing:
        differences.append(f"{len(missing)} steps were never computed, the first is {missing[0]}")
    return differences
