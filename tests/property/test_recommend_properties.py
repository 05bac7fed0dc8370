"""Recommendation against an exhaustive search of all configurations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.profiler import recommendation
from slurm_elastic.profiler.recommendation import (
    Configuration,
    ConfigurationCost,
    NoConfigurationError,
    StepTimes,
    Work,
)

# Few different values, so that times and costs tie.
SECONDS = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.5]) | st.floats(0, 2)
CONFIGURATIONS = st.builds(
    lambda gpu_type, nodes, per_node, batch: Configuration(
        gpu_type, nodes, nodes * per_node, batch
    ),
    st.sampled_from(["a100", "v100", "t4"]),
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([32, 64]),
)
TIMES = st.builds(
    StepTimes,
    compute_s=st.sampled_from([0.1, 0.2, 0.4]) | st.floats(0.01, 2),
    interconnect_s=SECONDS,
    network_s=SECONDS,
    prep_s=SECONDS,
    fetch_s=SECONDS,
    spread_s=SECONDS,
)
#: On the same step times everywhere twice the GPUs cost the same, or the same GPUs of another
#: type take as long: to the last digit.
IDEAL = st.just(StepTimes(compute_s=0.1, fetch_s=0.1))


def offers_of(times):
    return st.lists(
        st.builds(ConfigurationCost, CONFIGURATIONS, times),
        min_size=1,
        max_size=12,
        unique_by=lambda o: o.configuration,
    )


OFFERS = offers_of(TIMES) | offers_of(IDEAL)
WORKS = st.builds(
    Work,
    samples=st.sampled_from([1, 2**14, 10_000]) | st.integers(1, 10**6),
    epochs=st.integers(1, 90),
    always_cold=st.booleans(),
)
PRICES = st.none() | st.fixed_dictionaries(
    {t: st.sampled_from([0.5, 1.0, 3.2]) for t in ("a100", "v100", "t4")}
)


def seconds(offer, work):
    """Return the seconds, added epoch by epoch and stall by stall."""
    where, times = offer.configuration, offer.times
    steps, rest = divmod(work.samples, where.batch * where.gpus)
    steps += rest > 0
    total = 0.0
    for epoch in range(work.epochs):
        step = times.compute_s + times.interconnect_s + times.network_s + times.prep_s
        if epoch == 0 or work.always_cold:
            step += times.fetch_s
        total += steps * step
    return total


def exhaustive(rows, *, first, second, deadline, budget):
    """Return the index of the best row, None when none is within the limits."""
    best = None
    for i, row in enumerate(rows):
        if row["time_s"] > deadline * 3600 or row["cost"] > budget:
            continue
        if best is None or (row[first], row[second]) < (rows[best][first], rows[best][second]):
            best = i
    return best


@given(OFFERS, WORKS, PRICES)
def test_time_and_cost_are_those_of_a_clock_and_a_bill(offers, work, prices):
    for offer, choice in zip(offers, recommendation.evaluate(offers, work, prices), strict=True):
        expected = seconds(offer, work)
        price = 1.0 if prices is None else prices[offer.configuration.gpu_type]
        bill = sum(expected / 3600 * price for _ in range(offer.configuration.gpus))
        assert choice.offer is offer
        assert choice.time_s == pytest.approx(expected, rel=1e-9)
        assert choice.cost == pytest.approx(bill, rel=1e-9)
        later = choice.time_s - choice.first_s
        assert later == pytest.approx((work.epochs - 1) * choice.epoch_s, rel=1e-9, abs=1e-6)
        assert choice.first_s >= choice.epoch_s


@given(OFFERS, WORKS, PRICES, st.data())
def test_the_answer_is_that_of_exhaustive_search(offers, work, prices, data):
    choices = recommendation.evaluate(offers, work, prices)
    rows = [{"time_s": c.time_s, "cost": c.cost} for c in choices]
    # Limits just met, just missed, in between, none.
    times = [r["time_s"] / 3600 for r in rows]
    limits = [math.inf, *times, *(t * 1.01 for t in times), min(times) * 0.9]
    deadline = data.draw(st.sampled_from(limits) | st.floats(0.001, 100))
    costs = [r["cost"] for r in rows]
    limits = [math.inf, *costs, *(c * 1.01 for c in costs), min(costs) * 0.9]
    budget = data.draw(st.sampled_from(limits) | st.floats(0.001, 100))
    for pick, first, second in (
        (recommendation.cheapest, "cost", "time_s"),
        (recommendation.fastest, "time_s", "cost"),
    ):
        best = exhaustive(rows, first=first, second=second, deadline=deadline, budget=budget)
        if best is None:
            with pytest.raises(NoConfigurationError) as caught:
                pick(choices, deadline=deadline, budget=budget)
            _check_nearest(caught.value, rows, deadline, budget)
        else:
            found = pick(choices, deadline=deadline, budget=budget)
            assert (found.time_s, found.cost) == (rows[best]["time_s"], rows[best]["cost"])


def _check_nearest(error, rows, deadline, budget):
    in_time = [r for r in rows if r["time_s"] <= deadline * 3600]
    paid = [r for r in rows if r["cost"] <= budget]
    if error.limit == "deadline":
        assert in_time == []
        assert error.nearest.time_s == min(r["time_s"] for r in rows)
    elif error.limit == "budget":
        assert paid == []
        assert error.nearest.cost == min(r["cost"] for r in rows)
    else:
        assert in_time != []
        assert paid != []
        assert error.nearest.cost == min(r["cost"] for r in in_time)


@given(offers_of(TIMES), WORKS, PRICES, st.data())
def test_if_no_one_meets_both_the_cheapest_in_time_is_named(offers, work, prices, data):
    choices = recommendation.evaluate(offers, work, prices)
    deadline = data.draw(st.sampled_from([c.time_s for c in choices])) / 3600 * (1 + 1e-12)
    least = min(c.cost for c in choices if c.time_s <= deadline * 3600)
    budget = least * 0.999
    for pick in (recommendation.cheapest, recommendation.fastest):
        with pytest.raises(NoConfigurationError) as caught:
            pick(choices, deadline=deadline, budget=budget)
        if any(c.cost <= budget for c in choices):
            assert (caught.value.limit, caught.value.nearest.cost) == ("both", least)
        else:
            assert caught.value.limit == "budget"


@given(OFFERS, WORKS, PRICES)
def test_with_both_limits_one_alone_is_enough(offers, work, prices):
    """If any configuration meets both, the cheapest within the deadline is within the budget."""
    choices = recommendation.evaluate(offers, work, prices)
    for one in choices:
        limits = {"deadline": one.time_s / 3600 * (1 + 1e-12), "budget": one.cost}
        both = recommendation.cheapest(choices, **limits)
        assert both == recommendation.cheapest(choices, deadline=limits["deadline"])


@given(OFFERS, WORKS, PRICES)
def test_no_configuration_dominates_the_front(offers, work, prices):
    choices = recommendation.evaluate(offers, work, prices)
    expected = [
        one
        for one in choices
        if not any(
            o.time_s <= one.time_s
            and o.cost <= one.cost
            and (o.time_s < one.time_s or o.cost < one.cost)
            for o in choices
        )
    ]
    found = recommendation.pareto_front(choices)
    assert sorted(map(id, found)) == sorted(map(id, expected))
    assert [c.time_s for c in found] == sorted(c.time_s for c in found)
    assert [c.cost for c in found] == sorted((c.cost for c in found), reverse=True)
    assert recommendation.fastest(choices) in found
    assert recommendation.cheapest(choices) in found


@given(st.permutations(range(6)), st.data())
def test_the_order_of_profiles_does_not_matter(order, data):
    offers = data.draw(
        st.lists(
            st.builds(ConfigurationCost, CONFIGURATIONS, TIMES),
            min_size=6, max_size=6, unique_by=lambda o: o.configuration,
        )
    )  # fmt: skip
    work = data.draw(WORKS)
    straight = recommendation.evaluate(offers, work)
    shuffled = recommendation.evaluate([offers[i] for i in order], work)
    assert recommendation.cheapest(straight) == recommendation.cheapest(shuffled)
    assert recommendation.fastest(straight) == recommendation.fastest(shuffled)
    assert recommendation.pareto_front(straight) == recommendation.pareto_front(shuffled)


@given(OFFERS, WORKS)
def test_a_rival_is_near_in_one_and_better_in_the_other(offers, work):
    choices = recommendation.evaluate(offers, work)
    best = recommendation.cheapest(choices)
    rival = recommendation.as_good(choices, best, by="cost")
    allowed = [
        c
        for c in choices
        if c is not best
        and c.time_s < 0.9 * best.time_s
        and c.cost - best.cost
        < 2 * math.sqrt((c.cost * c.spread) ** 2 + (best.cost * best.spread) ** 2)
    ]
    if rival is None:
        assert allowed == []
    else:
        assert rival.time_s == min(c.time_s for c in allowed)
