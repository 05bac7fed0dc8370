"""Places for jobs that grow and shrink by companions."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.core.resize_kind import companion_change
from slurm_elastic.placement import in_place_places
from slurm_elastic.placement.eligibility import RoundJob, elastic_jobs
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import NodeArrays
from tests.support.synthetic_clusters import Cluster, node


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
) -> tuple[RoundJob, NodeArrays]:
    cluster = Cluster([node(f"n{i}") for i in range(1, 5)])
    cluster.add(
        7, elastic=elastic, on=grown(base, *parts), companions=companions(*parts),
        record={"in_place": in_place},
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


def test_a_job_keeps_its_gpus_and_gets_others_on_few_nodes():
    round_job, frame = with_job({"n1": 2}, others={"n1": 2})
    assert larger(round_job, frame, 4) == {"n1": 2, "n2": 2}
    assert larger(round_job, frame, 5) == {"n1": 2, "n2": 3}


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
