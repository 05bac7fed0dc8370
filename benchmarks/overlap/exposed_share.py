"""The share of an exchange that lengthens a step, and the least one that cores allow."""

from __future__ import annotations

#: Of the exchange to the passes, where most of it can be hidden: backward passes take two thirds.
BACKWARD = 2 / 3
#: Name among times: CPU seconds of the whole machine in one exchange.
CPU = "exchange-cpu"


def exposed(times: dict[str, float], arm: str) -> float:
    """Return the part of the exchange that lengthens a step of an arm.

    >>> exposed({"alone": 2.0, "exchange": 1.0, "flat": 3.5}, "flat")
    1.5
    """
    return (times[arm] - times["alone"]) / times["exchange"]


def least_exposed(times: dict[str, float], *, ranks: int, cores: int) -> float:
    """Return the part of the exchange that lengthens a step at least, for lack of cores.

    The processes and the kernel copy what is exchanged, and add it up. That needs cores on which
    the ranks do not compute in this time; a rank computes on one.

    >>> times = {"alone": 2.0, "exchange": 1.0, CPU: 0.8}
    >>> [round(least_exposed(times, ranks=2, cores=n), 3) for n in (2, 3)]
    [0.4, 0.0]
    """
    step = (ranks * times["alone"] + times[CPU]) / cores
    return max(0.0, (step - times["alone"]) / times["exchange"])
