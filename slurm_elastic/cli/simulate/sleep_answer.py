"""Answer of `selastic compare --sleep`: how long idle nodes could have slept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurm_elastic.config.schema import SleepSettings
    from slurm_elastic.simulator.results import Result


def sleep_by_run(
    runs: Mapping[str, Sequence[Result]], settings: SleepSettings
) -> dict[str, dict[str, float]]:
    """Return the figures of sleep of each policy, by the name of its row."""
    from slurm_elastic.simulator.sleep_figures import sleep_figures  # noqa: PLC0415

    return {name: sleep_figures(results, settings) for name, results in runs.items()}


def sleep_lines(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each policy, and what is not counted."""
    from slurm_elastic.simulator.sleep_figures import FIRST_DAYS  # noqa: PLC0415

    lines = [
        f"{name}: idle nodes could have slept {one['asleep_node_h']:.1f} node hours"
        f" ({one['saved_kwh']:.1f} kWh); {one['late_nodes']:.0f} nodes would have been late"
        for name, one in figures.items()
    ]
    note = "counted afterwards, by [sleep]: no simulated job waits for a boot"
    if not any(one["asleep_node_h"] for one in figures.values()):
        note += f"; nothing sleeps in the first {FIRST_DAYS:.0f} day"
    return [*lines, f"({note})"]
