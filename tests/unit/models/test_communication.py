"""Cost of distance: the closed form against hand calculations, measured stalls, shared links."""

import math

import pytest

from slurm_elastic.models.communication import (
    ClosedForm,
    CommunicationError,
    GangLink,
    SlowdownTable,
    Stalls,
    uplink_shares,
)

FAST, SLOW = GangLink(bytes_s=100.0), GangLink(bytes_s=10.0, latency_s=0.5)


def form(**more):
    fields = {"domain": FAST, "node": FAST, "rack": SLOW, "spine": SLOW}
    return ClosedForm(compute_s={"m": 10.0}, gradient_bytes={"m": 100.0}, **(fields | more))


def test_a_ring_by_hand():
    # 4 participants: 6 messages of 25 bytes over the slowest link
    assert form(method="ring").seconds(100.0, 4, (1, 4, 4)) == pytest.approx(6 * (2.5 + 0.5))
    assert form(method="ring").seconds(100.0, 4, (1, 1, 1)) == pytest.approx(6 * 0.25)


def test_a_tree_by_hand():
    assert form(method="tree").seconds(100.0, 8, (1, 8, 8)) == pytest.approx(6 * (10 + 0.5))


def test_hierarchical_sends_less_over_the_slow_links():
    # 8 GPUs, two nodes of one domain: 4 inside (6 x 0.25 s), then 25 bytes between 2
    inside, across = 6 * 0.25, 2 * (12.5 / 10 + 0.5)
    assert form().seconds(100.0, 8, (1, 2, 2)) == pytest.approx(inside + across)
    assert form().seconds(100.0, 8, (1, 2, 2)) < form(method="ring").seconds(100.0, 8, (1, 2, 2))


def test_each_tier_costs_more_and_one_gpu_nothing():
    spans = ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 2, 2))
    parts = [form().part("m", 4, span) for span in spans]
    assert parts == sorted(parts, reverse=True)
    assert form().part("m", 1, (1, 1, 1)) == 1.0
    assert form(overlap=1.0).part("m", 4, (1, 1, 1)) == 1.0


def test_congestion_slows_the_spine_only():
    halved = form(uplink_share=0.5)
    assert halved.part("m", 4, (1, 2, 2)) == form().part("m", 4, (1, 2, 2))
    assert halved.part("m", 4, (2, 2, 2)) < form().part("m", 4, (2, 2, 2))
    assert uplink_shares({"r1": 2, "r2": 0}, congestion=4) == {"r1": 0.125, "r2": 0.25}


def test_measured_stalls_count_where_they_were_measured_and_scale_the_rest():
    stated = SlowdownTable({("m", 2, 1, 1, 1): 0.8, ("m", 2, 2, 2, 2): 0.5})
    stalls = Stalls(measured={("m", 2, 1, 1, 1): 2 / 3}, otherwise=stated)
    assert stalls.part("m", 2, (1, 1, 1)) == pytest.approx(2 / 3)
    # odds 0.5 instead of 0.25: twice as much communication everywhere
    assert stalls.part("m", 2, (2, 2, 2)) == pytest.approx(1 / 3)
    assert stalls.part("m", 1, (1, 1, 1)) == 1.0
    assert math.isclose(Stalls(measured={}, otherwise=stated).part("m", 2, (2, 2, 2)), 0.5)


@pytest.mark.parametrize("bytes_s", [0.0, -1.0, math.inf, math.nan])
def test_links_that_cannot_be(bytes_s):
    with pytest.raises(CommunicationError, match="link: "):
        GangLink(bytes_s=bytes_s)


def test_what_is_not_known_is_named():
    with pytest.raises(CommunicationError, match="step time or gradient bytes of x"):
        form().part("x", 2, (1, 1, 1))
    with pytest.raises(CommunicationError, match='method "star"'):
        form(method="star").part("m", 2, (1, 1, 1))
    with pytest.raises(CommunicationError, match=r"congestion: 0\.5 is invalid"):
        uplink_shares({}, congestion=0.5)
