"""Gangs by offers: accepted places, waits and order."""

import math

import pytest

from slurm_elastic.models.communication import SlowdownTable
from slurm_elastic.placement.delay.free_map import FreeMap, GangTier, NodeLayout
from slurm_elastic.placement.delay.place_choice import PlaceChoice, ideal, places
from slurm_elastic.placement.delay.timers import Timers, TimersError
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gandiva import Gandiva
from slurm_elastic.simulator.gangs.gang_policy import Held, Offer
from slurm_elastic.simulator.gangs.own_dally import OwnDally
from slurm_elastic.simulator.gangs.published_dally import PublishedDally
from slurm_elastic.simulator.gangs.reserve import NodeReserve
from slurm_elastic.simulator.gangs.tiresias import Tiresias

LEASE = 3600.0
#: Two racks of two nodes of four GPUs in two link domains.
SITES = NodeLayout.regular(racks=2, nodes=2, gpus=4, domains=2)


class Steps:
    """Communication: `far` loses with each tier, `even` only by uneven shares."""

    def part(self, model, gpus, span):
        racks, nodes, _ = span
        if model == "even" or gpus == 1:
            return 1.0
        return 0.1 if racks > 1 else 0.5 if nodes > 1 else 0.9


def gang(job_id, gpus, *, model="far", since=0.0, **more):
    return Gang(
        job_id=job_id, model=model, gpus=gpus, arrival_s=since, since_s=since,
        ideal_s=10 * LEASE, **more,
    )  # fmt: skip


def offer(gangs, free, *, now=0.0, policy=None, running=None):
    ordered = sorted(gangs, key=policy.rank) if policy else gangs
    return Offer(now_s=now, waiting=ordered, room=FreeMap(SITES, free), running=running or {})


def places_of(answer):
    return {g.job_id: g.place for g in answer.grants}


ONE_IN_EACH_NODE = [1, 0] * 4


def test_manual_timers_let_a_gang_spread_step_by_step():
    policy = PublishedDally(Timers.parse("1,2", lease_s=LEASE))
    for waited, tier in ((0.9, None), (1.0, GangTier.RACK), (2.0, GangTier.RACK)):
        answer = policy.decide(offer([gang(1, 2)], ONE_IN_EACH_NODE, now=waited * LEASE), {})
        assert [g.tier for g in answer.grants] == ([tier] if tier else [])
    apart = [1, 0, 0, 0, 1, 0, 0, 0]
    assert policy.decide(offer([gang(1, 2)], apart, now=1.5 * LEASE), {}).grants == ()
    answer = policy.decide(offer([gang(1, 2)], apart, now=2 * LEASE), {})
    assert answer.grants[0].tier is GangTier.NETWORK


def test_full_waits_for_ever_and_nowait_never():
    for mode, count in (("full", 0), ("nowait", 1)):
        policy = PublishedDally(Timers.parse(mode, lease_s=LEASE))
        answer = policy.decide(offer([gang(1, 2)], ONE_IN_EACH_NODE, now=1e9), {})
        assert len(answer.grants) == count


def test_a_gang_larger_than_a_node_does_not_wait_for_one():
    answer = PublishedDally(Timers.parse("full", lease_s=LEASE)).decide(
        offer([gang(1, 6)], None), {}
    )
    assert answer.grants[0].tier is GangTier.RACK


def test_a_gang_is_never_placed_in_part():
    policy = PublishedDally(Timers.parse("nowait", lease_s=LEASE))
    answer = policy.decide(offer([gang(1, 5), gang(2, 4)], ONE_IN_EACH_NODE), {})
    assert {j: sum(g for _, g in p) for j, p in places_of(answer).items()} == {2: 4}


def test_the_gang_that_suffered_most_goes_first_and_new_ones_before_all():
    policy = PublishedDally(Timers.parse("auto", lease_s=LEASE))
    spread = gang(1, 2, done=0.1, ran_s=10 * LEASE)
    packed = gang(2, 2, done=0.9, ran_s=9 * LEASE)
    assert min([packed, spread, gang(3, 2)], key=policy.rank).job_id == 3
    assert policy.rank(spread) < policy.rank(packed)


def test_the_published_tuner_learns_from_waits():
    timers, waits = Timers.parse("auto", lease_s=LEASE), {}
    assert timers.limits_s(4, waits) == (6 * LEASE, 12 * LEASE)
    for hours in (10, 10, 10):
        waits = timers.remember(waits, "node", 4, now_s=100 * LEASE, waited_s=hours * LEASE)
    assert timers.limits_s(4, waits) == (10 * LEASE, 12 * LEASE)
    assert timers.limits_s(8, waits) == (6 * LEASE, 12 * LEASE)
    waits = timers.remember(waits, "node", 4, now_s=101 * LEASE, waited_s=90 * LEASE)
    assert timers.limits_s(4, waits)[0] == 20 * LEASE
    new_waits = timers.remember(waits, "node", 4, now_s=101 * LEASE, waited_s=0.5 * LEASE)
    assert new_waits == waits


@pytest.mark.parametrize("text", ["", "1", "2,1", "-1,3", "nan,nan", "automatic"])
def test_timers_that_cannot_be(text):
    with pytest.raises(TimersError, match="is invalid: expected auto, nowait, full"):
        Timers.parse(text, lease_s=LEASE)


def test_tiresias_consolidates_what_is_skewed_only():
    even, skewed = gang(1, 2, model="ResNet50"), gang(2, 2, model="VGG")
    answer = Tiresias().decide(offer([even, skewed], ONE_IN_EACH_NODE, now=9 * LEASE), {})
    assert set(places_of(answer)) == {1}
    loose = Tiresias(published=True).decide(offer([skewed], ONE_IN_EACH_NODE), {})
    assert set(places_of(loose)) == {2}


def test_tiresias_serves_the_least_served_first():
    assert Tiresias().rank(gang(1, 2, service_gpu_s=5)) > Tiresias().rank(gang(2, 2))


def test_gandiva_starts_anywhere_and_comes_together_later():
    first = Gandiva().decide(offer([gang(1, 2)], ONE_IN_EACH_NODE), {})
    assert first.grants[0].tier is GangTier.RACK
    spread = gang(1, 2, since=7.0)
    spread.last = ((0, 1), (2, 1))
    later = Gandiva().decide(offer([spread], [1, 0, 1, 0, 2, 0, 0, 0], now=7.0), {})
    assert places_of(later) == {1: ((4, 2),)}


def test_ours_starts_a_gang_that_does_not_suffer_and_lets_the_other_wait():
    policy = OwnDally(Steps(), lease_s=LEASE)
    gangs = [gang(1, 2, model="far"), gang(2, 2, model="even")]
    answer = policy.decide(offer(gangs, ONE_IN_EACH_NODE, policy=policy), {})
    assert set(places_of(answer)) == {2}
    assert answer.wake_s == 3 * LEASE


def test_ours_takes_the_tightest_of_equal_places():
    policy = OwnDally(Steps(), lease_s=LEASE)
    answer = policy.decide(offer([gang(1, 2)], [2, 2, 0, 2, 2, 2, 2, 2]), {})
    assert places_of(answer) == {1: ((3, 2),)}


def test_ours_stays_where_it_is_unless_another_place_is_better():
    policy = OwnDally(Steps(), lease_s=LEASE)
    runs = gang(1, 2, since=5.0)
    runs.last = ((6, 2),)
    assert places_of(policy.decide(offer([runs], None, now=5.0), {})) == {1: ((6, 2),)}
    runs.last = ((4, 1), (6, 1))
    assert places_of(policy.decide(offer([runs], None, now=5.0), {}))[1] != runs.last


def test_ours_keeps_nodes_for_a_gang_that_is_due():
    policy = OwnDally(Steps(), lease_s=LEASE)
    wide, small = gang(1, 4), gang(2, 1, since=3 * LEASE, model="even")
    runs = {9: Held(gang(9, 3), ((0, 1), (1, 2)), 3.5 * LEASE)}
    late = {7: Held(gang(7, 12), ((2, 2), (3, 2), (4, 2), (5, 2), (6, 2), (7, 2)), 9 * LEASE)}
    question = offer([small, wide], [1] + [0] * 7, now=3 * LEASE, running=runs | late)
    assert places_of(policy.decide(question, {"waits": []})) == {}
    freed = offer([small, wide], [2, 2] + [0] * 6, now=3.5 * LEASE, running=late)
    assert places_of(policy.decide(freed, {"waits": []})) == {1: ((0, 2), (1, 2))}


def test_our_timer_grows_with_the_waits():
    policy = OwnDally(Steps(), lease_s=LEASE)
    waiting = [gang(1, 2)]
    calm = policy.decide(offer(waiting, ONE_IN_EACH_NODE, now=LEASE / 2), {})
    busy = {"waits": [[0.0, 20.0], [0.0, 40.0]]}
    tense = policy.decide(offer(waiting, ONE_IN_EACH_NODE, now=LEASE / 2), busy)
    assert calm.wake_s == 3 * LEASE
    assert tense.wake_s == 50 * LEASE
    endless = {"waits": [[0.0, 1e6]]}
    assert policy.decide(offer(waiting, ONE_IN_EACH_NODE, now=1.0), endless).wake_s == 96 * LEASE


def test_a_reservation_takes_the_nodes_that_are_free_first():
    room = FreeMap(SITES, [0, 0, 2, 0, 0, 0, 0, 0])
    ends = [(50.0, ((0, 2), (1, 2))), (20.0, ((3, 2),)), (10.0, ((4, 2), (5, 2), (6, 2), (7, 2)))]
    reserve = NodeReserve(room, ends, 0.0)
    assert reserve.keep(4) == ()
    assert room.free[2] == 2, "the second rack is free sooner"
    assert reserve.keep(4) == ()
    assert reserve.keep(4) == ()
    assert room.free[2] == 0, "kept for the third, which has only the first rack left"
    assert reserve.keep(8) == ()


def test_places_are_tried_from_near_to_far():
    room = FreeMap(SITES)
    tiers = [SITES.tier(p) for p in places(room, 4)]
    assert tiers[0] is GangTier.NODE
    assert GangTier.RACK in tiers
    assert all(sum(g for _, g in p) == 6 for p in places(room, 6))
    assert list(places(FreeMap(SITES, [0] * 8), 1)) == []
    assert ideal(SITES, Steps(), "far", 4) == 0.9
    assert PlaceChoice(room, Steps()).best("far", 6, enough=1.0)[1] == 0.5


def test_a_room_counts_and_refuses_what_it_has_not():
    room = FreeMap(SITES)
    room.take(((0, 2), (2, 1)))
    assert (room.free_total, room.node[:2], room.rack) == (13, [2, 3], [5, 8])
    with pytest.raises(ValueError, match="domain 0"):
        room.take(((0, 1),))
    room.give(((0, 2), (2, 1)))
    assert room.free == list(SITES.size)
    with pytest.raises(
        ValueError, match=r"3 link domains per node is invalid: .* divide the 8 GPUs"
    ):
        NodeLayout.regular(racks=1, nodes=1, gpus=8, domains=3)


def test_a_table_with_a_hole_names_it():
    with pytest.raises(ValueError, match="no row for VGG on 2 GPUs over 1 rack, 2 nodes"):
        SlowdownTable({}).part("VGG", 2, (1, 2, 2))
    assert math.isclose(SlowdownTable({("VGG", 2, 1, 2, 2): 0.5}).part("VGG", 2, (1, 2, 2)), 0.5)
