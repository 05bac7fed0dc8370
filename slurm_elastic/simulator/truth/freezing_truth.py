"""The truth about freezing in simulations: which layers converge when, and what it costs.

Nobody knows this of real workloads; so it is three beliefs (`BELIEFS`), from pessimistic to
optimistic, and results are to be shown for all of them (docs/icefrog.md). Of L layers, at the
fraction q of a job's progress:

* layer l converges at `first + (last - first) (l - 1) / (L - 1)`: front layers first, as all
  papers on freezing found (our definition: evenly). The library notices it `late` later.
* It certifies a prefix as ours does (training/freezing/freezer.py): not before a tenth of the
  training, nothing new after 95 %, no more than PipeTransformer's cap
  (`models.frozen_penalty.cap`) with tenths as epochs, and only with a penalty within the user's
  `MAX_PENALTY`.
* At `thaws` all layers thaw, as when the learning rate falls tenfold; the bootstrap period
  begins again.
* The penalty that is measured of n layers is `rest n / L`: what converged layers would still
  have brought. What is truly lost of the progress is `cost` times that: the job trains longer,
  until it is as good.
* A step with n layers frozen takes `fixed + (1 - fixed) C(n)` of its computing and
  `latency + (1 - latency) W(n)` of its visible synchronisation, C and W the parts of the layers'
  seconds and bytes that are left (architectures.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from slurm_elastic.core.application import LayerCost
from slurm_elastic.models.frozen_penalty import cap
from slurm_elastic.simulator.truth import architectures

#: What every simulated user writes: freeze=auto,max-penalty=2%.
MAX_PENALTY = 0.02
#: Fractions of the training, as in training/freezing/freezer.py: first and last new freeze.
BEGIN, END = 0.1, 0.95
_CAP_EPOCHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What is believed of freezing; see the module."""

    first: float
    last: float
    late: float
    thaws: tuple[float, ...]
    rest: float
    cost: float
    fixed: float
    latency: float


BELIEFS: Mapping[str, Belief] = {
    # About what FreezeOut promises at most: 20 % less time, and that at a price.
    "pessimistic": Belief(
        first=0.4, last=1.3, late=0.1, thaws=(1 / 3, 2 / 3), rest=0.04, cost=3.0,
        fixed=0.3, latency=0.3,
    ),
    # The lower end of Egeria's 19-43 % speedup.
    "central": Belief(
        first=0.2, last=1.1, late=0.05, thaws=(2 / 3,), rest=0.02, cost=1.0,
        fixed=0.1, latency=0.1,
    ),
    # Its upper end; AutoFreeze (2.55x) and PipeTransformer (2.83x) gain more by other means too.
    "optimistic": Belief(
        first=0.1, last=0.95, late=0.02, thaws=(), rest=0.01, cost=0.5,
        fixed=0.05, latency=0.05,
    ),
}  # fmt: skip


class FreezingTruth:
    """One application's; an instance serves all its jobs.

    Args:
        costs: of its layers, from the front.
        belief: about freezing.

    Attributes:
        layers: how many there are.
    """

    def __init__(self, costs: tuple[LayerCost, ...], belief: Belief) -> None:
        self.costs, self.belief, self.layers = costs, belief, len(costs)
        seconds = sum(c.forward_s + c.backward_s for c in costs)
        size = sum(c.parameter_bytes for c in costs)
        saved = accumulate((c.backward_s for c in costs), initial=0.0)
        unsent = accumulate((c.parameter_bytes for c in costs), initial=0.0)
        b = belief
        self._compute = [b.fixed + (1 - b.fixed) * (1 - s / seconds) for s in saved]
        self._network = [b.latency + (1 - b.latency) * (1 - w / size) for w in unsent]
        span = (b.last - b.first) / max(1, self.layers - 1)
        seen = [b.first + b.late + span * i for i in range(self.layers)]
        # The last layer never freezes.
        self._seen = seen[:-1]

    def certified(self, done: float) -> int:
        """Front layers that may be frozen when this fraction of the progress is made."""
        began = max((t for t in self.belief.thaws if t <= done), default=0.0)
        at = min(done, END)
        if at < began + BEGIN:
            return 0
        found = sum(1 for seen in self._seen if seen <= at)
        found = min(found, cap(self.layers, int(_CAP_EPOCHS * at + 1e-9)))
        while found and self.penalty(found) > MAX_PENALTY:
            found -= 1
        return found

    def penalty(self, frozen: int) -> float:
        """Fraction of useful progress lost, as the library measures it."""
        return self.belief.rest * frozen / self.layers

    def lost(self, frozen: int) -> float:
        """Fraction of progress lost in truth."""
        return min(1.0, self.belief.cost * self.penalty(frozen))

    def times(self, step_s: float, micro_s: float, frozen: int) -> tuple[float, float]:
        """(step, micro-step) with layers frozen, of those without; seconds."""
        micro = micro_s * self._compute[frozen]
        return micro + (step_s - micro_s) * self._network[frozen], micro


def of(application: str, belief: Belief) -> FreezingTruth | None:
    """The truth about an application; None: its layers are not known, it freezes nothing."""
    costs = architectures.layers(application)
    return FreezingTruth(costs, belief) if costs else None
