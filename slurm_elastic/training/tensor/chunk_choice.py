"""Choice of the number of chunks by measuring the first steps, on rank 0.

Rank 0's request is one of the values that all ranks agree on with each step, so that all change
before the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_elastic.training.exchange.schedule_trial import ScheduleTrial
from slurm_elastic.training.tensor.chunked_products import Chunking

#: Numbers of chunks that are tried, by their number in agreements; the first is that of `none`.
COUNTS = (1, 2, 4, 8)
#: Indexes into `COUNTS` for each value of `init`'s `overlap`; with two of them nothing is measured.
_CANDIDATES = {"none": (0,), "buckets": (0, 2), "auto": (0, 1, 2, 3)}


class ChunkChoice:
    """Number of chunks of the products of one model.

    Args:
        overlap: "none", "buckets" or "auto"; that of rank 0 counts.
        leads: this is rank 0.
        log: takes one line for the job's log, on rank 0.

    Attributes:
        chunking: with the present number.
    """

    def __init__(self, overlap: str, *, leads: bool, log: Callable[[str], None]) -> None:
        self.chunking = Chunking(COUNTS[0])
        self._number = self._agreed = 0
        self._log = log
        chooses = leads and overlap != "none"
        self._trial = ScheduleTrial(_CANDIDATES[overlap]) if chooses else None
        self._begun_at = 0.0

    @property
    def name(self) -> str:
        """Name of the present choice in reports; "": there is none, or not on this rank."""
        return f"chunks-{self.chunking.count}" if self._trial else ""

    @property
    def requested(self) -> float:
        """Number that rank 0 requests; 0 on other ranks."""
        return float(self._trial.requested) if self._trial else 0.0

    def agree(self, number: float) -> None:
        """Set the sum of the ranks' requests, which the next step follows."""
        self._agreed = round(number)

    def begin(self) -> bool:
        """Begin a step with the number that was agreed on; return whether it has changed."""
        changed = self._agreed != self._number
        self._number = self._agreed
        self.chunking.count = COUNTS[self._number]
        self._begun_at = time.monotonic()
        return changed

    def end(self) -> None:
        """End a step, whose gradients are reduced."""
        if self._trial is None:
            return
        running = self._trial.running
        seconds = time.monotonic() - self._begun_at
        self._trial.observe(self._number, pass_s=seconds, waited_s=0.0)
        if running and not self._trial.running:
            gain = self._trial.gain
            compared = "" if gain is None else f", a step takes {gain:.2f} of one with 1 chunk"
            self._log(f"tensor-parallel products: {COUNTS[self._trial.requested]} chunks{compared}")
