"""Schedule of the controller: times of the next reading of jobs and of the next round.

Looks and rounds cost time of this process and of slurmctld, and more of it with more jobs: the
longer they took, the longer the pause after them. All times are of time.monotonic, since the
clock may be set.

>>> schedule = PollSchedule()
>>> schedule.round_is_due()
True
>>> with schedule.measuring_round(every_s=30.0):
...     pass
>>> schedule.round_is_due(), 0 < schedule.pause(poll_s=2.0, live=False) <= 2.0
(False, True)
"""

from __future__ import annotations

import math
import resource
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds between two reads of jobs while a transition is under way.
_FAST_S = 0.2
#: Shares of a core: of cheap looks while nothing happens, of looks while transitions are live,
#: and of rounds however much happens.
_IDLE_SHARE, _FAST_SHARE, _ROUND_SHARE = 0.004, 0.2, 0.1
#: Least seconds between a change and the round after it: changes that belong together come one
#: after the other.
_SETTLE_S = 0.3
#: A request for an unknown job schedules the next look after this time.
_UNKNOWN_S = 1.0
_FIRST_SILENCE_S, _SILENCE_MAX_S = 1.0, 15.0
_INTERNAL_ERROR_S = 10.0
#: Rounds whose times are kept.
_ROUNDS = 1000


def _cpu_s() -> float:
    """Return the seconds of CPU of this process and of commands that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class PollSchedule:
    """The waits of one controller.

    Attributes:
        silence_s: how long Slurm is not asked because it did not answer; 0: it answers.
        rounds: seconds that the last rounds took, and of CPU in this process, the newest last.
        asked_for: a request named a job that is not known yet.
    """

    def __init__(self) -> None:
        self.silence_s = 0.0
        self.rounds: deque[tuple[float, float]] = deque(maxlen=_ROUNDS)
        self.has_unknown_job = False
        self._answers_since = -math.inf
        self._next_round = 0.0
        self._not_before = 0.0
        self._looked = self._all_read = 0.0
        self._pulse_s = self._look_s = self._all_s = 0.0

    def pause(self, *, poll_s: float, live: bool) -> float:
        """Return the seconds until the next look.

        Args:
            poll_s: at most, while nothing happens and looking is cheap.
            live: transitions are under way.
        """
        if self.silence_s:
            return self.silence_s
        if live:
            return max(_FAST_S, self._look_s / _FAST_SHARE)
        if self.has_unknown_job:
            return _UNKNOWN_S
        poll = max(poll_s, self._pulse_s / _IDLE_SHARE)
        return max(0.05, min(poll, self.until_round()))

    # --- looks ---

    @contextmanager
    def measuring_pulse(self) -> Iterator[None]:
        """Measure a cheap look, whose cost decides how often it is done."""
        began = _cpu_s()
        yield
        self._pulse_s = _cpu_s() - began

    @contextmanager
    def measuring_read(self) -> Iterator[None]:
        """Measure the reading of the jobs."""
        self.has_unknown_job, self._looked = False, time.monotonic()
        began = _cpu_s()
        yield
        self._look_s = _cpu_s() - began

    @contextmanager
    def measuring_full_read(self) -> Iterator[None]:
        """Measure the reading of all jobs, whose cost decides when all are read again."""
        began = _cpu_s()
        yield
        self._all_s, self._all_read = _cpu_s() - began, time.monotonic()

    def full_read_is_due(self) -> bool:
        """Return whether a look during transitions shall read all jobs, not only theirs.

        Where that is cheap: always.
        """
        pause_s = self._all_s / _FAST_SHARE
        return pause_s <= _FAST_S or time.monotonic() - self._all_read >= pause_s

    def note_unknown_job(self) -> bool:
        """Note a request for an unknown job; return whether it may cause a look at once."""
        self.has_unknown_job = True
        return time.monotonic() - self._looked > _UNKNOWN_S

    def note_silence(self) -> bool:
        """Wait longer each time while Slurm does not answer; return whether that is new."""
        news = not self.silence_s
        self.silence_s = min(_SILENCE_MAX_S, self.silence_s * 2 or _FIRST_SILENCE_S)
        return news

    def note_answer(self) -> bool:
        """Note that Slurm has answered; return whether that is new."""
        news = bool(self.silence_s)
        if news:
            self.silence_s, self._answers_since = 0.0, time.monotonic()
        return news

    def answering_s(self) -> float:
        """Return for how many seconds Slurm has answered since it last did not."""
        return 0.0 if self.silence_s else time.monotonic() - self._answers_since

    def wait_after_error(self) -> None:
        """Wait for some time after an internal error."""
        self.silence_s = _INTERNAL_ERROR_S

    # --- rounds ---

    def round_is_due(self) -> bool:
        """Return whether a round is due now."""
        return time.monotonic() >= self._next_round

    def until_round(self) -> float:
        """Return the seconds until the next round is due."""
        return self._next_round - time.monotonic()

    def soon(self, seconds: float = _SETTLE_S) -> None:
        """Schedule a round after so many seconds, if rounds are cheap enough for that."""
        due = max(time.monotonic() + max(seconds, _SETTLE_S), self._not_before)
        self._next_round = min(self._next_round, due)

    def at_once(self) -> None:
        """Make a round due at the next look."""
        self._next_round = 0.0

    @contextmanager
    def measuring_round(self, *, every_s: float) -> Iterator[None]:
        """Measure a round; the next is due after `every_s` unless something happens."""
        self._next_round = time.monotonic() + every_s
        wall, cpu = time.monotonic(), _cpu_s()
        yield
        spent = _cpu_s() - cpu
        self.rounds.append((time.monotonic() - wall, spent))
        self._not_before = wall + spent / _ROUND_SHARE
        self._next_round = max(self._next_round, self._not_before)

    def last_round(self) -> str:
        """Return the times of the last round, for the log."""
        return "Seconds={:.3f} Cpu={:.3f}".format(*self.rounds[-1])
