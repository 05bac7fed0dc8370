"""Truth about freezing in simulations: which layers converge when, and the loss of accuracy.

This is unknown for real workloads; so there are three sets of assumptions (`BELIEFS`), from
pessimistic to optimistic, and results should be shown for all of them (docs/icefrog.md). Of L
layers, by fraction of a job's progress:

* Layer l converges at `first + (last - first) (l - 1) / (L - 1)`: front layers first, as all
  papers on freezing report (our definition: evenly). The library detects it `detection_lag` later.
* The library certifies a prefix (training/freezing/freezer.py): not before a tenth of the training,
  nothing new after 95 %, no more than PipeTransformer's cap (`models.frozen_penalty.cap`) with
  tenths as epochs, and only with a penalty within the user's `MAX_PENALTY`.
* At `thaws` all layers thaw, as when the learning rate falls tenfold; the bootstrap period
  begins again.
* The measured penalty of n layers is `penalty_scale n / L`: the progress that converged layers
  would still have made. The true loss is `cost` times that: the job trains longer to make up for
  it.
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

#: Directive of every simulated user: freeze=auto,max-penalty=2%.
MAX_PENALTY = 0.02
#: Fractions of the training, as in training/freezing/freezer.py: first and last new freeze.
BEGIN, END = 0.1, 0.95
_CAP_EPOCHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """Assumptions about freezing; see the module."""

    first: float
    last: float
    detection_lag: float
    thaws: tuple[float, ...]
    penalty_scale: float
    cost: float
    fixed: float
    latency: float


BELIEFS: Mapping[str, Belief] = {
    # About the best result of FreezeOut: 20 % less time, with a loss of accuracy.
    "pessimistic": Belief(
        first=0.4, last=1.3, detection_lag=0.1, thaws=(1 / 3, 2 / 3), penalty_scale=0.04, cost=3.0,
        fixed=0.3, latency=0.3,
    ),
    # The lower end of Egeria's 19-43 % speedup.
    "central": Belief(
        first=0.2, last=1.1, detection_lag=0.05, thaws=(2 / 3,), penalty_scale=0.02, cost=1.0,
        fixed=0.1, latency=0.1,
    ),
    # Its upper end; AutoFreeze (2.55x) and PipeTransformer (2.83x) also gain by other means.
    "optimistic": Belief(
        first=0.1, last=0.95, detection_lag=0.02, thaws=(), penalty_scale=0.01, cost=0.5,
        fixed=0.05, latency=0.05,
    ),
}  # fmt: skip


class FreezingTruth:
    """Truth of one application; an instance serves all its jobs.

    Args:
        costs: costs of its layers, from the front.
        belief: assumptions about freezing.

    Attributes:
        layers: number of its layers.
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
        noticed = [b.first + b.detection_lag + span * i for i in range(self.layers)]
        # The last layer never freezes.
        self._seen = noticed[:-1]

    def certified(self, progress: float) -> int:
        """Return the number of front layers that may be frozen at this fraction of the progress."""
        began = max((t for t in self.belief.thaws if t <= progress), default=0.0)
        capped_progress = min(progress, END)
        if capped_progress < began + BEGIN:
            return 0
        layers = sum(1 for noticed in self._seen if noticed <= capped_progress)
        layers = min(layers, cap(self.layers, int(_CAP_EPOCHS * capped_progress + 1e-9)))
        while layers and self.penalty(layers) > MAX_PENALTY:
            layers -= 1
        return layers

    def penalty(self, frozen: int) -> float:
        """Return the fraction of useful progress lost, as the library measures it."""
        return self.belief.penalty_scale * frozen / self.layers

    def lost(self, frozen: int) -> float:
        """Return the fraction of progress that is lost."""
        return min(1.0, self.belief.cost * self.penalty(frozen))

    def times(self, step_s: float, micro_s: float, frozen: int) -> tuple[float, float]:
        """Return (step, micro-step) with layers frozen from those without; seconds."""
        micro = micro_s * self._compute[frozen]
        return micro + (step_s - micro_s) * self._network[frozen], micro


def of(application: str, belief: Belief) -> FreezingTruth | None:
    """Return the truth about an application; None if its layers are unknown: it freezes nothing."""
    costs = architectures.layers(application)
    return FreezingTruth(costs, belief) if costs else None
