"""Settings of Slurm's power saving, and what in them keeps nodes from being switched off and on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.cluster import Node
from slurm_elastic.core.nodelist import expand
from slurm_elastic.slurm.slurm_settings import read_settings, seconds

_COUNT = re.compile(r":[0-9]+")
#: Slurm's default of ResumeTimeout.
_RESUME_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSaving:
    """Settings of power saving.

    Attributes:
        missing: why nodes cannot be switched off or on, a pair of setting and harm for each
            reason; (): they can.
        suspend_time_s: after so many idle seconds Slurm itself switches a node off.
        resume_timeout_s: seconds after which a node that does not come up is down.
        excluded_nodes, excluded_partitions: those that shall never be switched off.
    """

    missing: tuple[tuple[str, str], ...] = ()
    suspend_time_s: float = float("inf")
    resume_timeout_s: float = _RESUME_TIMEOUT_S
    excluded_nodes: frozenset[str] = frozenset()
    excluded_partitions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> PowerSaving:
        """Return those of the output of `scontrol show config`, by name."""
        missing = [
            (name, f"is not set, nothing switches nodes {direction}")
            for name, direction in (("SuspendProgram", "off"), ("ResumeProgram", "on"))
            if not settings.get(name)
        ]
        suspend = seconds(settings.get("SuspendTime", ""))
        if suspend is None or suspend == float("inf"):
            missing.append(("SuspendTime", "is INFINITE, which turns power saving off"))
        excluded, problem = _excluded(settings.get("SuspendExcNodes", ""))
        if problem:
            missing.append(("SuspendExcNodes", problem))
        return cls(
            missing=tuple(missing),
            suspend_time_s=float("inf") if suspend is None else suspend,
            resume_timeout_s=seconds(settings.get("ResumeTimeout", "")) or _RESUME_TIMEOUT_S,
            excluded_nodes=excluded,
            excluded_partitions=frozenset(
                p for p in settings.get("SuspendExcParts", "").split(",") if p
            ),
        )

    @classmethod
    def read(cls, *, timeout_s: float) -> PowerSaving:
        """Ask slurmctld; without an answer nothing can be switched."""
        settings, error = read_settings(timeout_s=timeout_s)
        return cls.of(settings) if settings else cls(missing=(("slurm.conf", error),))

    def excludes(self, node: Node) -> bool:
        """Return whether a node shall never be switched off."""
        return node.name in self.excluded_nodes or bool(self.excluded_partitions & node.partitions)


def _excluded(text: str) -> tuple[frozenset[str], str]:
    """Return the nodes of SuspendExcNodes, and why it cannot be read, or "".

    `nid[10-20]:4` lets Slurm choose four of them; none of them is switched off then.
    """
    try:
        return frozenset(expand(_COUNT.sub("", text))), ""
    except ValueError as error:
        return frozenset(), f"cannot be read ({error})"
