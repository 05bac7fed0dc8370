"""Nodes that the controller has switched off, as the ledger keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger

_NAME = "sleeping_nodes"
#: The number of cycles is bounded over so long.
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class SleepingNode:
    """One node.

    Attributes:
        since: when it was switched off, epoch s.
        woken: when it was switched on again; None: it was not.
    """

    since: float
    woken: float | None = None


class SleepingNodes:
    """Nodes that were switched off and are not awake again; every change is written at once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._nodes: dict[str, SleepingNode] = {}
        self._cycles: dict[str, list[float]] = {}
        self._loaded = False

    def load(self) -> None:
        """Read the ledger, once; what cannot be read is left out."""
        if self._loaded:
            return
        value: Any = self._ledger.get(_NAME, {})
        for name, row in _mapping(value, "nodes").items():
            try:
                since, woken = row
                self._nodes[name] = SleepingNode(
                    float(since), None if woken is None else float(woken)
                )
            except (TypeError, ValueError):
                continue
        for name, times in _mapping(value, "cycles").items():
            if isinstance(times, list):
                self._cycles[name] = [float(t) for t in times if isinstance(t, int | float)]
        self._loaded = True

    @property
    def all(self) -> Mapping[str, SleepingNode]:
        """All of them, those that boot included."""
        return self._nodes

    @property
    def asleep(self) -> dict[str, float]:
        """Since when (epoch s) each node sleeps that was not woken."""
        return {name: n.since for name, n in self._nodes.items() if n.woken is None}

    @property
    def waking(self) -> tuple[str, ...]:
        """Nodes that boot."""
        return tuple(sorted(name for name, n in self._nodes.items() if n.woken is not None))

    def cycles(self, name: str, now: float) -> int:
        """Return how often a node was switched off in the last day."""
        return sum(t > now - _DAY_S for t in self._cycles.get(name, ()))

    def switched_off(self, names: Collection[str], now: float) -> None:
        """Record nodes that are about to be switched off.

        Raises:
            LedgerError: it cannot be written; nothing is recorded.
        """
        cycles = {
            name: recent
            for name, times in self._cycles.items()
            if (recent := [t for t in times if t > now - _DAY_S])
        }
        for name in names:
            cycles[name] = [*cycles.get(name, ()), now]
        self._write({**self._nodes, **{name: SleepingNode(now) for name in names}}, cycles)

    def switched_on(self, names: Collection[str], now: float) -> None:
        """Record nodes that boot, as `switched_off`."""
        woken = {n: SleepingNode(self._nodes[n].since, now) for n in names if n in self._nodes}
        self._write({**self._nodes, **woken}, self._cycles)

    def not_woken(self, names: Collection[str]) -> None:
        """Record nodes that were switched on and have not booted, as `switched_off`."""
        asleep = {n: SleepingNode(self._nodes[n].since) for n in names if n in self._nodes}
        self._write({**self._nodes, **asleep}, self._cycles)

    def ended(self, names: Collection[str]) -> None:
        """Record nodes that sleep no longer, as `switched_off`."""
        self._write({k: v for k, v in self._nodes.items() if k not in names}, self._cycles)

    def _write(self, nodes: dict[str, SleepingNode], cycles: dict[str, list[float]]) -> None:
        if nodes == self._nodes and cycles == self._cycles:
            return
        rows = {name: [n.since, n.woken] for name, n in sorted(nodes.items())}
        self._ledger.put(_NAME, {"nodes": rows, "cycles": cycles})
        self._nodes, self._cycles = nodes, cycles


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}
