"""Nodes that could have slept in a simulation, by the rule of `[sleep]`.

Only counted afterwards: no simulated job waits for a boot. Nothing sleeps in the first day.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_elastic.config.schema import SleepSettings
from slurm_elastic.placement.sleep.awake_rule import LEAST_HISTORY, AwakeRule, Floats, replayed
from slurm_elastic.simulator.results import Result

#: Seconds of a bin, as in the controller.
_BIN_S = 600.0
#: Days without sleep at the start.
FIRST_DAYS = LEAST_HISTORY * _BIN_S / 86_400


def sleep_figures(results: Sequence[Result], settings: SleepSettings) -> dict[str, float]:
    """Return the figures of sleep over the workloads: node hours asleep, kWh, and late nodes.

    A node is late in a bin of ten minutes in which it is in use although it should sleep.
    """
    rule = AwakeRule(window=max(1, round(settings.window_s / _BIN_S)), served=settings.served)
    asleep, late = 0.0, 0.0
    for result in results:
        used = _used(result)
        awake = np.minimum(replayed(used, result.nodes, rule) + settings.spare, result.nodes)
        asleep += float((result.nodes - np.maximum(awake, used)).sum()) * _BIN_S / 3600
        late += float(np.maximum(used - awake, 0).sum())
    return {
        "asleep_node_h": asleep,
        "saved_kwh": asleep * settings.idle_watts / 1000,
        "late_nodes": late,
    }


def _used(result: Result) -> Floats:
    """Return the most nodes in use at once in each bin from the first round on."""
    if not result.rounds:
        return np.zeros(0)
    first, last = result.rounds[0].time_s, result.rounds[-1].time_s
    used = np.zeros(int((last - first) // _BIN_S) + 1)
    present, at = 0, 0
    for round_ in result.rounds:
        number = int((round_.time_s - first) // _BIN_S)
        # What was in use goes on to be in use until the round.
        used[at : number + 1] = np.maximum(used[at : number + 1], present)
        present, at = round_.nodes, number
        used[number] = max(used[number], present)
    return used
