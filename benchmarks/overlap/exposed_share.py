"""The share of an exchange that lengthens a step."""

from __future__ import annotations

#: Of the exchange to the passes, where most of it can be hidden: backward passes take two thirds.
BACKWARD = 2 / 3


def exposed(times: dict[str, float], arm: str) -> float:
    """Return the part of the exchange that lengthens a step of an arm.

    >>> exposed({"alone": 2.0, "exchange": 1.0, "flat": 3.5}, "flat")
    1.5
    """
    return (times[arm] - times["alone"]) / times["exchange"]
