"""Costs of changes of a running job without a requeue, as measured.

Measured with companion jobs on the container cluster (Slurm 24.11, torch 2.6, gloo, two cores),
beside 6.5 s from notice to first step of a requeue of the same script (medians):

* in place, training stands still for 11 ms with 1 million parameters, 0.18 s with 30 million and
  0.60 s with 100 million (from 2 to 4 ranks), and not at all when it shrinks; from the decision
  until all ranks take part 2.5 s (from 2 to 4 ranks) and 4.3 s (from 4 to 8);
* where only the ranks are restarted, it stands still for 3.0 s.

So the pause grows with the state to send, by 6 ms per million parameters. New ranks start as the
script starts: their job trains on meanwhile, on the GPUs that it had, for as long as a restart of
its application takes, at least 4.3 s. That is our choice, and pessimistic: a restart loads a
checkpoint, too. Of a restart of the ranks, what remains is the restart without Slurm's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.simulator.workloads.builtin_profiles import FAMILIES

#: Least seconds from the decision until new ranks take part.
_JOIN_S = 4.3
#: Seconds of a pause beside those of the parameters, and per parameter.
_PAUSE_S = 0.005
_PARAMETER_S = 6e-9
#: Least seconds of a restart of the ranks, and the seconds that it saves against a requeue.
_RANKS_S = 3.0
_SAVED_S = 3.5
#: Parameters of applications whose number is not known.
_PARAMETERS = 100e6


@dataclass(frozen=True, kw_only=True)
class ResizeCosts:
    """Seconds of changes without a requeue.

    Attributes:
        cheapest: the cheapest kind of change that jobs can do, in place or a restart of the ranks.
        join_s: seconds from the decision until new ranks take part; None: those of a restart.
        parameters: by application; others have 100 million.
    """

    cheapest: ResizeKind = ResizeKind.IN_PLACE
    join_s: float | None = None
    parameters: Mapping[str, float] = field(
        default_factory=lambda: {family.name: family.parameters for family in FAMILIES}
    )

    def pause_s(self, application: str) -> float:
        """Return the seconds that training stands still when ranks join in place."""
        parameters = self.parameters.get(application.partition("#")[0], _PARAMETERS)
        return _PAUSE_S + _PARAMETER_S * parameters

    def joined_after_s(self, restart_s: float) -> float:
        """Return the seconds from the decision until new ranks take part.

        Args:
            restart_s: seconds of a restart of the application.
        """
        return max(_JOIN_S, restart_s) if self.join_s is None else self.join_s

    def ranks_restart_s(self, restart_s: float) -> float:
        """Return the seconds of a restart of the ranks, no longer than one of the application."""
        return min(restart_s, max(_RANKS_S, restart_s - _SAVED_S))
