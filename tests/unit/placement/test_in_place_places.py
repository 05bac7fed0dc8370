"""Places that a job reaches in place, and what a change costs by its kind."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Companion, Job, JobState
from slurm_elastic.core.resize_kind import companion_change
from slurm_elastic.placement import in_place_places
from slurm_elastic.placement.eligibility import RoundJob, elastic_jobs
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.in_place_places import FreeRoom, place_in_place
from slurm_elastic.placement.node_arrays import NodeArrays
from tests.support.decisions.synthetic_clusters import Cluster, node


def companions(*shares: tuple[str, int]) -> tuple[Companion, ...]:
    return tuple(
        Companion(10 + i, Allocation.of("a100", {name: gpus}))
        for i, (name, gpus) in enumerate(shares)
    )


def grown(base: dict[str, int], *parts: tuple[str, int]) -> dict[str, int]:
    shares = dict(base)
    for name, gpus in parts:
        shares[name] = shares.get(name, 0) + gpus
    return shares


def with_job(
    base: dict[str, int],
    *parts: tuple[str, int],
    elastic: str = "1-16",
    others: dict[str, int] | None = None,
    in_place: bool = True,
    restarts: bool = False,
) -> tuple[RoundJob, NodeArrays]:
    cluster = Cluster([node(f"n{i}") for i in range(1, 5)])
    cluster.add(
        7, elastic=elastic, on=grown(base, *parts), companions=companions(*parts),
        record={"in_place": in_place, "restarts": restarts},
    )  # fmt: skip
    if others:
        cluster.add(8, on=others)
    frame = NodeArrays(cluster.snapshot())
    return elastic_jobs(frame, cluster.records, Config())[7], frame


def larger(round_job: RoundJob, frame: NodeArrays, gpus: int) -> dict[str, int] | None:
    free = FreeResources(frame)
    free.give(round_job.need, round_job.current)
    place = in_place_places.larger(round_job, round_job.demand(frame), gpus, free)
    return dict(place.shares) if place else None


def smaller(round_job: RoundJob) -> list[dict[str, int]]:
    return [dict(place.shares) for place in in_place_places.smaller(round_job)]


def test_companions_hold_whole_spatial_groups() -> None:
    one = with_job({"n1": 2}, elastic="2-8,parallel=spatial")
    assert larger(*one, 4) is None
    pairs = with_job({"n1": 2}, elastic="2-8,parallel=spatial,unit=2")
    grown_shares = larger(*pairs, 4)
    assert grown_shares is not None
    assert all(gpus % 2 == 0 for gpus in grown_shares.values())


def test_a_job_keeps_its_gpus_and_gets_others_on_few_nodes():
    round_job, frame = with_job({"n1": 2}, others={"n1": 2})
    assert larger(round_job, frame, 4) == {"n1": 2, "n2": 2}
    assert larger(round_job, frame, 5) == {"n1": 2, "n2": 3}


def test_a_program_that_is_started_again_gets_gpus_of_other_nodes_only():
    round_job, frame = with_job({"n1": 1}, in_place=False, restarts=True)
    assert larger(round_job, frame, 4) == {"n1": 1, "n2": 3}
    round_job, frame = with_job({"n1": 2}, ("n2", 1), in_place=False, restarts=True)
    assert larger(round_job, frame, 7) == {"n1": 2, "n2": 1, "n3": 4}


def test_uneven_shares_are_taken_where_no_even_ones_are_free():
    round_job, frame = with_job({"n1": 2}, others={"n1": 1, "n2": 2, "n3": 4, "n4": 4})
    assert larger(round_job, frame, 5) == {"n1": 3, "n2": 2}
    assert larger(round_job, frame, 6) is None


def test_whole_companions_leave_and_the_base_stays():
    round_job, _ = with_job({"n1": 2}, ("n1", 1), ("n2", 4))
    assert smaller(round_job) == [{"n1": 2, "n2": 4}, {"n1": 3}, {"n1": 2}]
    round_job, _ = with_job({"n1": 2}, ("n2", 4), elastic="1-8,sizes=1:2:6")
    assert smaller(round_job) == [{"n1": 2}]


def test_where_a_job_cannot_be_changed_in_place_there_are_none():
    round_job, frame = with_job({"n1": 2}, ("n2", 2), in_place=False)
    assert smaller(round_job) == []
    assert larger(round_job, frame, 6) is None


@given(
    st.dictionaries(st.sampled_from(["n1", "n2"]), st.integers(1, 2), min_size=1),
    st.lists(st.tuples(st.sampled_from(["n1", "n2", "n3"]), st.just(1)), max_size=2),
    st.dictionaries(st.sampled_from(["n3", "n4"]), st.integers(1, 2)),
    st.integers(1, 12),
)
def test_each_place_fits_and_is_reached_by_companions(base, parts, others, gpus):
    round_job, frame = with_job(base, *parts, others=others)
    held = [c.allocation for c in round_job.job.companions]
    own = round_job.job.base_allocation
    assert own is not None
    for place in in_place_places.smaller(round_job):
        assert companion_change(own, held, place) is not None
    if gpus <= sum(grown(base, *parts).values()):
        return
    found = larger(round_job, frame, gpus)
    if found is not None:
        assert sum(found.values()) == gpus
        assert companion_change(own, held, Allocation.of("a100", found)) is not None
        assert all(count + others.get(name, 0) <= 4 for name, count in found.items())


def running(base, *companions):
    shares = dict(base)
    for companion in companions:
        for name, gpus in companion.items():
            shares[name] = shares.get(name, 0) + gpus
    return Job(
        job_id=1, display_id="1", name="a", user="u", uid=1000, state=JobState.RUNNING,
        partition="gpu", allocation=Allocation.of("a100", shares),
        companions=tuple(
            Companion(10 + i, Allocation.of("a100", c)) for i, c in enumerate(companions)
        ),
    )  # fmt: skip


def place(job, gpus, **room):
    allocation = place_in_place(job, gpus, 4, room)
    return dict(allocation.shares) if allocation else None


def test_it_grows_on_the_node_of_its_base_and_then_over_whole_nodes():
    job = running({"g2": 1})
    assert place(job, 4, g1=4, g2=4, g3=4) == {"g2": 4}
    assert place(job, 2, g1=4, g2=3, g3=4) == {"g2": 2}
    assert place(job, 8, g1=4, g2=4, g3=4) == {"g1": 4, "g2": 4}
    assert place(job, 6, g1=3, g2=4, g3=2) == {"g2": 4, "g3": 2}


def test_without_room_on_the_node_of_its_base_it_does_not_grow():
    assert place(running({"g2": 1}), 2, g1=4, g2=1, g3=4) is None
    assert place(running({"g2": 1}), 4, g1=4, g2=3, g3=4) is None


def test_whole_companions_leave():
    job = running({"g1": 1}, {"g1": 1}, {"g1": 2}, {"g2": 4})
    room = {"g1": 4, "g2": 4, "g3": 4}
    assert place(job, 4, **room) == {"g1": 4}
    assert place(job, 2, **room) == {"g1": 2}
    assert place(job, 1, **room) == {"g1": 1}
    assert place(running({"g1": 1}, {"g1": 3}), 2, **room) is None
    assert place(running({"g1": 2}), 1, **room) is None


def test_what_remains_may_be_on_the_node_of_the_base():
    job = running({"g1": 2}, {"g2": 4})
    assert place(job, 6, g1=4, g2=4) == {"g1": 2, "g2": 4}


def test_a_pending_job_reaches_nothing_in_place():
    pending = Job(
        job_id=1, display_id="1", name="a", user="u", uid=1, state=JobState.PENDING, partition="gpu"
    )
    assert place(pending, 1, g1=4) is None


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), min_size=1),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4)), max_size=4),
    st.integers(1, 16),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 4)),
)
def test_a_place_has_the_size_fits_and_keeps_base_and_whole_companions(base, more, gpus, free):
    job = running(base, *({name: count} for name, count in more))
    room = {n: min(8, job.allocation.on(n) + free.get(n, 0)) for n in "abcd"}
    allocation = place_in_place(job, gpus, 8, room)
    if allocation is not None:
        assert allocation.gpus == gpus
        assert all(count <= room[name] for name, count in allocation.shares)
        companions = [c.allocation for c in job.companions]
        assert companion_change(job.base_allocation, companions, allocation) is not None


def test_room_is_what_it_holds_and_what_is_free_where_it_may_grow():
    nodes = [
        node("g1"), node("g2", planned=True), node("g3", available=False),
        node("g4", partitions=frozenset({"other"})), node("g5", gpu_type="v100"),
    ]  # fmt: skip
    c = Cluster(nodes)
    c.add(1, elastic="1-8", on={"g1": 1, "g2": 2})
    c.add(2, on={"g1": 1})
    room = FreeRoom(c.snapshot()).of(c.snapshot().job[1], 2)
    assert room == {"g1": 3, "g2": 2}


@pytest.mark.parametrize("gpus", [2, 3, 4, 6, 8, 12])
def test_nodes_that_are_left_out_make_no_difference(gpus):
    c = Cluster([node(f"g{i:02d}") for i in range(1, 31)])
    c.add(1, elastic="1-16", on={"g05": 2})
    for i in range(2, 31):
        if i != 5 and i % 4:
            c.add(i, on={f"g{i:02d}": i % 4})
    snapshot = c.snapshot()
    job = snapshot.job[1]
    few = FreeRoom(snapshot).of(job, -(-gpus // 4))
    every = {n.name: n.free_gpus + job.allocation.on(n.name) for n in snapshot.nodes}
    assert len(few) < len(every)
    places = [place_in_place(job, gpus, 4, room) for room in (few, every)]
    assert places[0] is not None
    assert sorted(g for _, g in places[0].shares) == sorted(g for _, g in places[1].shares)


@pytest.mark.parametrize(("in_place", "cost_s"), [(True, 0.5), (False, 32.0)])
def test_placement_weighs_a_change_by_its_kind(in_place, cost_s):
    c = Cluster([node("g1"), node("g2")])
    record = {"in_place": in_place, "pause_s": 0.5, "restart_s": 30.0, "checkpoint_s": 2.0}
    c.add(1, elastic="1-8", on={"g1": 2}, record=record)
    round_job = elastic_jobs(NodeArrays(c.snapshot()), c.records, Config())[1]
    assert round_job.change_cost_s(Allocation.of("a100", {"g1": 4})) == cost_s
    assert round_job.change_cost_s(Allocation.of("a100", {"g2": 4})) == 32.0
    assert round_job.change_cost_s(None) == 32.0
