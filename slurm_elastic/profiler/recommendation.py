"""Time and cost of a training on each configuration, and the recommended ones. Pure.

Our definition (the paper on STASH, ICDCS 2023, says "lower cost, given a time budget", and
publishes no formula). With N samples per epoch, b samples per GPU and step, G GPUs and E epochs

    steps = ceil(N / (b G))
    epoch = steps (compute + interconnect + network + prep)
    first = epoch + steps fetch
    T = first + (E - 1) epoch                 cost = T G price

so that only the first epoch reads from cold storage, unless the data set is too large to stay
in memory: then each one does. *The cheapest within a deadline* is the least cost among those
whose T is within it, *the fastest within a budget* the least T among those whose cost is.
An epoch counts as one epoch at any batch: how well a batch learns is not considered.

>>> step = StepTimes(compute_s=0.5, interconnect_s=0.1, fetch_s=0.2)
>>> offers = [ConfigurationCost(Configuration("a100", 1, g, 100), step) for g in (1, 4)]
>>> choices = evaluate(offers, Work(samples=6000, epochs=10), {"a100": 3.0})
>>> [(c.offer.configuration.gpus, c.time_s, round(c.cost, 2)) for c in choices]
[(1, 372.0, 0.31), (4, 93.0, 0.31)]
>>> fastest(choices, budget=1.0).offer.configuration.gpus
4
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError

HOUR_S = 3600.0


class NoConfigurationError(InvalidInputError):
    """No configuration is within a limit.

    Attributes:
        nearest: the one that misses it by least.
        limit: `deadline`, `budget`, or `both`: each alone is met by some configuration.
    """

    def __init__(self, text: str, nearest: Recommendation, limit: str) -> None:
        super().__init__(text)
        self.nearest = nearest
        self.limit = limit


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """GPUs and batch of a job.

    Attributes:
        gpus: on all nodes together, of one type.
        batch: samples per GPU and step.
    """

    gpu_type: str
    nodes: int
    gpus: int
    batch: int

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''}"
        return f"{self.gpus} {self.gpu_type or 'GPU'} on {nodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step: computing, and waiting for other GPUs and for data.

    Attributes:
        fetch_s: only while the data set is not in memory.
        spread_s: standard error of their sum without `fetch_s`; NaN: unknown.
    """

    compute_s: float
    interconnect_s: float = 0.0
    network_s: float = 0.0
    prep_s: float = 0.0
    fetch_s: float = 0.0
    spread_s: float = 0.0

    @property
    def warm_s(self) -> float:
        """Seconds of a step with the data set in memory."""
        return self.compute_s + self.interconnect_s + self.network_s + self.prep_s


@dataclass(frozen=True, slots=True)
class ConfigurationCost:
    """A configuration with the times of its steps.

    Attributes:
        estimated: not measured there, but extrapolated from other models.
    """

    configuration: Configuration
    times: StepTimes
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Size of a training.

    Attributes:
        samples: per epoch.
        always_cold: the data set does not fit in memory, so that every epoch reads it anew.
    """

    samples: int
    epochs: int = 1
    always_cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A configuration with its time and cost.

    Attributes:
        first_s: seconds of the first epoch.
        epoch_s: seconds of each later one.
        time_s: seconds of all.
        cost: GPU hours times the price of the type.
        spread: standard error of time and cost, as a fraction; NaN: unknown.
    """

    offer: ConfigurationCost
    first_s: float
    epoch_s: float
    time_s: float
    cost: float
    spread: float


def evaluate(
    offers: Iterable[ConfigurationCost], work: Work, prices: Mapping[str, float] | None = None
) -> list[Recommendation]:
    """Return time and cost of each offer, in the order given.

    Args:
        offers: configurations.
        work: the training.
        prices: of a GPU and hour, by type; None: the cost is in GPU hours.

    Raises:
        KeyError: no price for a type.
    """
    choices = []
    for offer in offers:
        configuration, times = offer.configuration, offer.times
        steps = math.ceil(work.samples / (configuration.batch * configuration.gpus))
        cold, warm = steps * (times.warm_s + times.fetch_s), steps * times.warm_s
        later = cold if work.always_cold else warm
        total = cold + (work.epochs - 1) * later
        price = 1.0 if prices is None else prices[configuration.gpu_type]
        choices.append(
            Recommendation(
                offer=offer,
                first_s=cold,
                epoch_s=later,
                time_s=total,
                cost=total / HOUR_S * configuration.gpus * price,
                spread=work.epochs * steps * times.spread_s / total if total else 0.0,
            )
        )
    return choices


def pareto_front(choices: Iterable[Recommendation]) -> list[Recommendation]:
    """Return the Pareto front in time and cost, the fastest first; equal ones are all kept."""
    front: list[Recommendation] = []
    for choice in sorted(choices, key=_by_time):
        last = front[-1] if front else None
        if last is None or choice.cost < last.cost or _is_tie(choice, last):
            front.append(choice)
    return front


def cheapest(
    choices: Sequence[Recommendation], *, deadline: float = math.inf, budget: float = math.inf
) -> Recommendation:
    """Return the least cost within limits; of equal ones the fastest, then the fewest GPUs.

    Args:
        choices: at least one.
        deadline: hours for all epochs.
        budget: cost of all epochs.

    Raises:
        NoConfigurationError: none is within the limits.
    """
    return min(_within(choices, deadline, budget), key=_by_cost)


def fastest(
    choices: Sequence[Recommendation], *, deadline: float = math.inf, budget: float = math.inf
) -> Recommendation:
    """Return the least time within limits; of equal ones the cheapest, then the fewest GPUs.

    Arguments and errors are those of `cheapest`.
    """
    return min(_within(choices, deadline, budget), key=_by_time)


def as_good(
    choices: Sequence[Recommendation], best: Recommendation, *, by: str
) -> Recommendation | None:
    """Return the best one that is as good as `best` within errors, and better in the other value.

    Args:
        choices: those allowed.
        best: the cheapest or the fastest of them.
        by: `cost` or `time_s`, the value in which `best` is best. The one returned differs in it
            by less than two standard errors of the difference; in the other value it is better by
            at least a tenth.

    Returns:
        None: there is none.
    """
    other_value = "time_s" if by == "cost" else "cost"
    value: Callable[[Recommendation, str], float] = getattr
    rivals = []
    for choice in choices:
        spread = math.hypot(
            best.spread * value(best, by), choice.spread * value(choice, by)
        )  # NaN: unknown, then there is no rival
        within_errors = value(choice, by) - value(best, by) < 2 * spread
        if (
            choice is not best
            and within_errors
            and value(choice, other_value) < 0.9 * value(best, other_value)
        ):
            rivals.append(choice)
    return min(rivals, key=lambda c: (value(c, other_value), _by_time(c)), default=None)


def _within(
    choices: Sequence[Recommendation], deadline: float, budget: float
) -> list[Recommendation]:
    in_time = [c for c in choices if c.time_s <= deadline * HOUR_S]
    affordable = [c for c in choices if c.cost <= budget]
    if not in_time:
        best = min(choices, key=_by_time)
        raise NoConfigurationError("no configuration is within the deadline", best, "deadline")
    if not affordable:
        best = min(choices, key=_by_cost)
        raise NoConfigurationError("no configuration is within the budget", best, "budget")
    affordable_in_time = [c for c in in_time if c.cost <= budget]
    if not affordable_in_time:
        best = min(in_time, key=_by_cost)
        raise NoConfigurationError(
            "no configuration is within both deadline and budget", best, "both"
        )
    return affordable_in_time


def _by_time(choice: Recommendation) -> tuple[float, float, int, Configuration]:
    configuration = choice.offer.configuration
    return choice.time_s, choice.cost, configuration.gpus, configuration


def _by_cost(choice: Recommendation) -> tuple[float, float, int, Configuration]:
    configuration = choice.offer.configuration
    return choice.cost, choice.time_s, configuration.gpus, configuration


def _is_tie(first: Recommendation, second: Recommendation) -> bool:
    return (first.time_s, first.cost) == (second.time_s, second.cost)
