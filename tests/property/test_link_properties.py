"""Properties of communication costs and measured links, whatever jobs report."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.link_estimates import DECIDING, LEAST_OWNERS, LinkEstimates
from slurm_elastic.models.links import CommunicationCost, Links
from slurm_elastic.models.live_communication import LiveCommunication
from slurm_elastic.models.speedup import SpeedModel

speeds = st.none() | st.floats(1e6, 1e13)
links = st.builds(
    lambda d, n, r, s: Links(domain=d, node=n, rack=r, spine=s), speeds, speeds, speeds, speeds
)
#: Values that report.py accepts.
reported = st.none() | st.floats(0.0, 1e6)


@st.composite
def shapes(draw):
    racks = draw(st.integers(1, 6))
    nodes = racks * draw(st.integers(1, 4))
    return nodes * draw(st.integers(1, 8)), nodes, racks


@st.composite
def measurements(draw):
    gpus, nodes, racks = draw(shapes())
    return Measurement(
        gpu_type=draw(st.sampled_from(["a100", "v100"])),
        gpus=gpus,
        nodes=nodes,
        racks=racks,
        samples_per_s=draw(st.floats(0.01, 1e6)),
        steps=10,
        compute_s=draw(reported),
        sync_s=draw(reported),
        reports=draw(st.integers(0, 9)),
    )


records = st.builds(
    lambda seen, size: JobRecord(job_id=1, measurements=tuple(seen), gradient_bytes=size),
    st.lists(
        measurements(), max_size=5, unique_by=lambda m: (m.gpu_type, m.gpus, m.nodes, m.racks)
    ),
    st.none() | st.floats(0.0, 1e15),
)
sizes = st.floats(1.0, 1e12)


@given(records, links, st.lists(shapes(), min_size=1, max_size=5), st.floats(0.01, 1.0))
def test_scalars_and_vectors_agree_and_speeds_are_positive(record, known, asked, share):
    model = SpeedModel.fit(
        SpeedupSettings(), record.measurements, CommunicationCost.of(record, known, {})
    )
    for kind in ("a100", "v100"):
        g, n, r = np.array(asked).T
        many = model.speeds(kind, g, n, r, share=share)
        one = [model.speed(kind, *shape, share=share) for shape in asked]
        assert np.isfinite(many).all()
        assert (many > 0).all()
        np.testing.assert_allclose(many, one, rtol=1e-9)


@given(records, links)
def test_a_measured_shape_is_predicted_as_measured_or_below(record, known):
    toll = CommunicationCost.of(record, known, {})
    model = SpeedModel.fit(SpeedupSettings(), record.measurements, toll)
    for m in record.measurements:
        predicted = model.speed(m.gpu_type, m.gpus, m.nodes, m.racks)
        assert predicted <= m.samples_per_s * (1 + 1e-6), "absurd claims are cut, not raised"


@given(records, links, shapes(), st.floats(0.01, 1.0))
def test_a_smaller_share_never_speeds_a_job_up(record, known, shape, share):
    model = SpeedModel.fit(
        SpeedupSettings(), record.measurements, CommunicationCost.of(record, known, {})
    )
    assert model.speed("a100", *shape, share=share) <= model.speed("a100", *shape) * (1 + 1e-9)


@given(links, sizes, st.floats(1e-3, 1e6), shapes(), st.floats(1.1, 100.0))
def test_distance_bytes_and_slower_links_only_cost(known, size, work, shape, times):
    gpus, nodes, racks = shape
    toll = CommunicationCost(links=known, gradient_bytes=size, work=(("a100", work),))
    part = toll.part("a100", gpus, nodes, racks)
    assert 0 < part <= 1
    more = CommunicationCost(links=known, gradient_bytes=size * times, work=toll.work)
    assert more.part("a100", gpus, nodes, racks) <= part
    # One rack is best, as long as a rack's uplink is no faster than a node's.
    slow = Links(rack=known.rack, spine=known.rack)
    toll = CommunicationCost(links=slow, gradient_bytes=size, work=(("a100", work),))
    nearest = toll.part("a100", gpus, nodes, 1)
    for r in range(2, nodes + 1):
        assert toll.part("a100", gpus, nodes, r) <= nearest * (1 + 1e-9)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abcd"), records), max_size=8), links, st.randoms())
def test_measured_links_do_not_depend_on_the_order_and_need_owners(jobs, configured, rng):
    seen = LinkEstimates.of(jobs, configured)
    shuffled = list(jobs)
    rng.shuffle(shuffled)
    again = LinkEstimates.of(shuffled, configured)
    assert again.links == seen.links
    stranger = seen.of_owner("nobody")
    for tier, link in seen.links.items():
        assert 0 < link.bytes_s < float("inf")
        assert link.owners <= link.jobs <= len(jobs)
        used = tier in DECIDING and link.owners >= LEAST_OWNERS
        assert (getattr(stranger, tier) is not None) == used == (seen.counts(tier) == "all")
        assert getattr(configured, tier) is None, "what is configured wins"
    for tier in ("domain", "node", "rack", "spine"):
        if getattr(configured, tier) is not None:
            assert getattr(stranger, tier) == getattr(configured, tier)


@given(records, links, shapes())
def test_the_part_is_a_part_whatever_is_reported(record, known, shape):
    model = SpeedModel.fit(
        SpeedupSettings(), record.measurements, CommunicationCost.of(record, known, {})
    )
    live = LiveCommunication.of({1: record}, {1: model})
    gpus, nodes, racks = shape
    for domains in (nodes, 2 * nodes):
        part = live.part("1", gpus, (racks, nodes, domains))
        assert 0 < part <= 1
        assert part == live.part("1", gpus, (racks, nodes, domains))
