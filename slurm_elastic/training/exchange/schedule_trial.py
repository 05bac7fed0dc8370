"""Choice of the schedule of exchange by measuring the first steps, on rank 0.

The clock of rank 0 counts, from the begin of a step to the end of its reduction: no rank gets there
before all others. Each schedule is used for a few steps, in turns and then in the opposite order,
so that a load that comes and goes meets all of them; the medians are compared. Pure: times in,
a number out.

>>> trial = ScheduleTrial((0, 2), warm_up=2)
>>> for _ in range(2):
...     trial.observe(trial.requested, pass_s=2.0, waited_s=1.0)
>>> trial.requested
2
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from slurm_elastic.training.exchange.exchange_schedule import FLAT

#: Steps before the first turn, with the flat schedule: those whose layers are measured.
WARM_UP = 14
#: Measured steps of a turn; the first with another schedule allocates, and does not count.
TURN = 3
#: Another schedule is kept if it saves this part of the time of a step (our choice).
_LEAST_GAIN = 0.02
#: An exchange that takes less than this part of a step is not worth a trial (our choice).
_LEAST_PART = 0.02
#: Newest steps whose times say how much of the exchange is exposed.
_NEWEST = 20


class ScheduleTrial:
    """Measurements of the schedules in one group of ranks.

    Args:
        numbers: of the schedules, `FLAT` first; with a single other one nothing is compared.
        warm_up: steps before the first turn.
        turn: measured steps of each turn.
        least_part: of a step: nothing is tried where the exchange takes less.

    Attributes:
        requested: number of the schedule for the next step.
        exchange_s: seconds of the exchange alone; None: not measured yet.
    """

    def __init__(
        self,
        numbers: Sequence[int],
        *,
        warm_up: int = WARM_UP,
        turn: int = TURN,
        least_part: float = _LEAST_PART,
    ) -> None:
        self.requested = FLAT
        self.exchange_s: float | None = None
        self._numbers, self._warm_up, self._turn = tuple(numbers), warm_up, turn
        self._least_part = least_part
        self._turns = [*numbers, *reversed(numbers)] if len(numbers) > 2 else list(numbers[1:])
        self._compares = len(numbers) > 2
        self._in_turn = 0
        self._times: dict[int, list[float]] = {}
        self._alone: deque[float] = deque(maxlen=_NEWEST)
        self._newest: deque[float] = deque(maxlen=_NEWEST)
        self._last = FLAT

    def observe(self, number: int, *, pass_s: float, waited_s: float) -> None:
        """Add a step that is done.

        Args:
            number: of the schedule that it had.
            pass_s: from the begin of the step to the end of its reduction.
            waited_s: of that, from the end of the last backward pass.
        """
        if number != self._last:  # the first step of a schedule allocates memory
            self._newest.clear()
            self._last = number
            return
        self._newest.append(pass_s)
        if number == FLAT:
            self._alone.append(pass_s - waited_s)
        if self._warm_up:
            self._warm_up -= 1
            if not self._warm_up and self._turns:
                self.requested = self._turns[0]
            return
        if not self._turns or number != self.requested:
            return
        self._times.setdefault(number, []).append(pass_s)
        self._in_turn += 1
        if self._too_short():
            self.stop()
        elif self._in_turn >= self._turn:
            self._in_turn = 0
            self._turns.pop(0)
            self.requested = self._turns[0] if self._turns else self._best()

    def stop(self) -> None:
        """End the trial: all further steps have the flat schedule."""
        self._turns, self.requested = [], FLAT

    @property
    def running(self) -> bool:
        """Whether schedules are still to be tried."""
        return bool(self._turns)

    @property
    def gain(self) -> float | None:
        """A step with the chosen schedule by one with the flat one; None: not compared."""
        if self.requested not in self._times or FLAT not in self._times:
            return None
        chosen_s, flat_s = (statistics.median(self._times[n]) for n in (self.requested, FLAT))
        return chosen_s / flat_s

    @property
    def exposed(self) -> float | None:
        """The part of the exchange that lengthens a step; None: not known yet.

        The step with exchange less the step without, by the exchange alone; above 1 where ranks
        also wait for slower ones.
        """
        if not self.exchange_s or not self._alone or not self._newest:
            return None
        alone_s = statistics.median(self._alone)
        return max(0.0, statistics.median(self._newest) - alone_s) / self.exchange_s

    def _too_short(self) -> bool:
        if self.exchange_s is None or not self._compares:
            return False
        return self.exchange_s < self._least_part * statistics.median(self._alone)

    def _best(self) -> int:
        if not self._compares:
            return self._numbers[-1]
        medians = {number: statistics.median(times) for number, times in self._times.items()}
        best = min(medians, key=lambda number: medians[number])
        return best if medians[best] < (1 - _LEAST_GAIN) * medians[FLAT] else FLAT
