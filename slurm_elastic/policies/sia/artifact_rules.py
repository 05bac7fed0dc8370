"""Deviations of Sia's published artifact from its paper, one switch each.

Their effects: the table in docs/sia-published.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.config.policy_settings import SiaSettings

#: Seconds of a restart of applications that the artifact has no constant for.
OTHER_RESTART_S = 30.0
#: Digits that the artifact keeps of a cost.
COST_DIGITS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRules:
    """True: as the artifact does; False: as the paper says.

    Attributes:
        batch_cap: goodput is optimised up to the user's batch, not up to the batch that the
            job may really run with.
        first_type: to a job that never ran all types are equal, whatever its one-GPU profiles say.
        first_observed: goodput on a type that was not measured follows the first measured type
            in order, not the one measured best.
        restart_constants: restarts count a constant by application, not the measured seconds.
        restart_window: a change costs nothing to a job younger than one restart.
        free_suspension: a job that was suspended comes back at full goodput, and leaving it out
            may cost less than changing it.
        rounding: costs have two decimals, so nearly equal configurations tie.
    """

    batch_cap: bool = False
    first_type: bool = False
    first_observed: bool = False
    restart_constants: bool = False
    restart_window: bool = False
    free_suspension: bool = False
    rounding: bool = False

    @classmethod
    def of(cls, config: SiaSettings) -> ArtifactRules:
        """Return the rules that a configuration sets."""
        names = cls.__slots__
        chosen = {n for n in names if n.replace("_", "-") in config.artifact_rules}
        return cls(**{n: config.artifact_compat or n in chosen for n in names})
