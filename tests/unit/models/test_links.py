"""Cost of crossing links, estimates of their speeds, and the scale of a job's stalls."""

import math

import numpy as np
import pytest

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.core.application import Application, Learned, Observation, TypeProfile
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.communication import ClosedForm, GangLink
from slurm_elastic.models.link_estimates import LinkEstimates
from slurm_elastic.models.links import GBIT, CommunicationCost, Links, step_work
from slurm_elastic.models.speedup import SpeedModel


def seen(gpus, nodes=1, racks=1, *, compute=1.0, sync=0.0, reports=3, kind="a100", rate=100.0):
    return Measurement(
        gpu_type=kind, gpus=gpus, nodes=nodes, racks=racks, samples_per_s=rate, steps=50,
        compute_s=compute, sync_s=sync, reports=reports,
    )  # fmt: skip


def record(*measurements, size=1e9, learned=None):
    return JobRecord(job_id=1, measurements=measurements, gradient_bytes=size, learned=learned)


KNOWN = Links(node=100e9, rack=10e9, spine=1e9)


def test_speeds_of_the_configuration_are_gigabits():
    links = Links.configured({"rack": 100.0, "domain": 4800.0})
    assert (links.rack, links.domain, links.spine) == (12.5e9, 600e9, None)
    assert links.inside() == links.inside(linked=True) == 600e9
    both = Links.configured({"node": 8.0, "domain": 16.0})
    assert (both.inside(), both.inside(linked=True)) == (1e9, 2e9)


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 2, 1), (8, 2, 2), (12, 3, 2), (64, 8, 4)])
def test_one_gpu_per_node_is_the_closed_form(shape):
    """With one GPU per node, and one node per rack, links are not shared."""
    _, _, racks = shape
    form = ClosedForm(
        compute_s={}, gradient_bytes={}, domain=GangLink(bytes_s=1e12),
        node=GangLink(bytes_s=100e9),
        rack=GangLink(bytes_s=10e9), spine=GangLink(bytes_s=1e9), uplink_share=0.5,
    )  # fmt: skip
    alone = float(KNOWN.tiers(1e9, racks, racks, racks, share=0.5)[2])
    assert alone == pytest.approx(form.seconds(1e9, racks, (racks, racks, racks)))


def test_the_link_of_a_node_carries_what_all_its_gpus_send():
    inside = 2 * 3 / 4 * 1e9 / 100e9
    assert float(KNOWN.seconds(1e9, 8, 2, 1)) == pytest.approx(inside + 1e9 / 10e9)
    assert float(KNOWN.seconds(1e9, 8, 2, 2)) == pytest.approx(inside + 1e9 / 1e9)
    assert float(KNOWN.tiers(1e9, 8, 2, 2, share=0.25)[2]) == pytest.approx(4.0)
    assert float(Links().seconds(1e9, 8, 2, 2)) == 0.0


def test_a_toll_needs_bytes_computing_and_a_link():
    good = record(seen(4))
    assert CommunicationCost.of(good, KNOWN, {}) is not None
    assert CommunicationCost.of(good, Links(), {}) is None
    assert CommunicationCost.of(record(seen(4), size=None), KNOWN, {}) is None
    assert CommunicationCost.of(record(), KNOWN, {}) is None
    for size in (0.0, -1.0, math.nan, math.inf):
        assert CommunicationCost.of(record(seen(4), size=size), KNOWN, {}) is None


def test_work_is_taken_from_the_parts_of_steps_then_micro_steps_then_earlier_jobs():
    def learned(*observations, profiled=True):
        application = Application(
            name="a", initial_batch=64, max_batch=64, batch=64, profiled=profiled,
            types=(TypeProfile("a100", 1, 64, single=32.0), TypeProfile("v100", 1, 64, single=8.0)),
        )  # fmt: skip
        return Learned(application, observations)

    earlier = record(learned=learned())
    assert step_work(earlier) == {"a100": 2.0, "v100": 8.0}
    assert step_work(record(learned=learned(profiled=False))) == {}, "relative speeds"
    once = record(learned=learned(Observation("a100", 1, 4, 16, 1.5, 1.0)))
    assert step_work(once) == {"a100": 4.0, "v100": 8.0}
    told = record(seen(4, compute=2.0), learned=once.learned)
    assert step_work(told) == {"a100": 8.0, "v100": 8.0}


def test_other_types_compute_as_fast_as_configured():
    toll = CommunicationCost.of(record(seen(4, compute=1.0)), KNOWN, {"a100": 2.0, "v100": 1.0})
    assert toll.part("v100", 8, 2, 2) > toll.part("a100", 8, 2, 2)
    assert toll.part("v100", 16, 4, 2) == pytest.approx(toll.part("a100", 8, 4, 2), rel=0.01)


def test_stalls_scale_what_the_links_say_and_not_without_end():
    stated = CommunicationCost.of(record(seen(1)), KNOWN, {})
    twice = float(2 * stated.seconds(8, 2, 2))
    scaled = CommunicationCost.of(record(seen(8, 2, 2, sync=twice)), KNOWN, {})
    assert float(scaled.seconds(8, 2, 2)) == pytest.approx(twice)
    assert scaled.scales[:2] == (1.0, 1.0)
    assert scaled.scales[2] > 2.0, "nearer tiers take what the links say"
    assert CommunicationCost.of(record(seen(8, 2, 2, sync=1e6)), KNOWN, {}).scales[2] == 32.0
    hidden = CommunicationCost.of(record(seen(8, 2, 1, sync=0.0)), KNOWN, {})
    assert hidden.scales == (1.0, 1 / 32, 0.5), "what hides little may not hide much"
    slow = CommunicationCost.of(record(seen(8, 2, 1, sync=1.0)), KNOWN, {})
    assert slow.scales[2] == slow.scales[1] > 1
    assert CommunicationCost.of(record(seen(4, sync=0.0)), KNOWN, {}).scales == (1 / 32, 1.0, 1.0)


def test_the_model_prefers_links_to_stated_losses_tier_by_tier():
    stated = SpeedupSettings(loss_in_node=0.1, loss_across_nodes=0.2)
    told = record(seen(8, compute=1.0, rate=80.0))
    spine = SpeedModel.fit(
        stated, told.measurements, CommunicationCost.of(told, Links(spine=1e9), {})
    )
    plain = SpeedModel.fit(stated, told.measurements)
    for model in (spine, plain):
        assert model.speed("a100", 8) == pytest.approx(80.0)
    one = spine.speed("a100", 8, 2, 1)
    assert one == pytest.approx(plain.speed("a100", 8, 2, 1)), "the rack's link is not known"
    assert spine.speed("a100", 8, 2, 2) == pytest.approx(one / 2, rel=1e-6), "1 s of 2"
    shared = spine.speed("a100", 8, 2, 2, share=0.5)
    assert shared == pytest.approx(one / 3, rel=1e-6), "2 s of 3"


def test_measured_racks_count_for_racks():
    stated = SpeedupSettings(loss_across_nodes=0.0)
    told = (seen(8, 2, 1, rate=100.0), seen(8, 2, 2, rate=30.0))
    model = SpeedModel.fit(stated, told)
    assert model.speed("a100", 8, 2, 1) == pytest.approx(100.0)
    assert model.speed("a100", 8, 2, 2) == pytest.approx(30.0)
    assert model.speed("a100", 16, 4, 2) < 0.6 * model.speed("a100", 16, 4, 1)
    many = model.speeds("a100", [8, 8, 16], [2, 2, 4], [1, 2, 2])
    assert many.tolist() == pytest.approx(
        [model.speed("a100", *s) for s in ((8, 2, 1), (8, 2, 2), (16, 4, 2))]
    )
    assert SpeedModel.fit(stated, (seen(8, 2, 3),)) is SpeedModel.fit(stated, ()), "3 racks of 2"


def test_models_differ_by_speeds_and_tolls_only():
    one, other = (SpeedModel.fit(SpeedupSettings(), (seen(8, sync=s),)) for s in (0.1, 0.2))
    assert one is other


def stall(speed, gpus=8, nodes=2, racks=1):
    """A job whose only known link sends so many bytes/s."""
    far = {"node": None, "rack": None, "spine": None}
    far["spine" if racks > 1 else "rack" if nodes > 1 else "node"] = speed
    return float(Links(**far).seconds(1e9, gpus, nodes, racks))


def test_links_are_measured_by_stalls_less_what_nearer_tiers_take():
    jobs = [
        ("ann", record(seen(8, 1, sync=stall(64e9, nodes=1)))),
        ("bob", record(seen(8, 2, sync=float(Links(node=64e9, rack=8e9).seconds(1e9, 8, 2, 1))))),
        ("cat", record(seen(8, 2, 2, sync=float(KNOWN.seconds(1e9, 8, 2, 2))))),
    ]
    found = LinkEstimates.of(jobs, Links())
    assert found.links["node"].bytes_s == pytest.approx(64e9, rel=0.1)
    assert found.links["rack"].bytes_s == pytest.approx(8e9, rel=0.1)
    assert found.links["spine"].bytes_s == pytest.approx(1e9, rel=0.1)
    assert found.of_owner("ann").node is None, "told only"
    assert (found.links["rack"].jobs, found.links["rack"].owners) == (1, 1)
    configured = LinkEstimates.of(jobs, Links(rack=5e9))
    assert set(configured.links) == {"node", "spine"}
    assert configured.of_owner("bob").rack == 5e9, "what is configured wins"


def test_few_reports_and_jobs_without_bytes_measure_nothing():
    for told in (record(seen(8, 2, sync=1.0, reports=2)), record(seen(8, 2, sync=1.0), size=None),
                 record(seen(1, sync=1.0)), record(seen(8, 2, sync=0.0))):  # fmt: skip
        assert LinkEstimates.of([("ann", told)], Links()).links == {}


def test_reports_of_one_other_user_do_not_count():
    liar = [("eve", record(seen(8, 2, sync=stall(1e4))))] * 50
    assert LinkEstimates.of(liar, Links()).of_owner("bob").rack is None
    assert LinkEstimates.of(liar, Links()).of_owner("eve").rack == pytest.approx(1e4, rel=0.1)
    honest = [(who, record(seen(8, 2, sync=stall(8e9)))) for who in ("ann", "bob")]
    assert LinkEstimates.of([*liar, *honest], Links()).of_owner("dan").rack == pytest.approx(
        8e9, rel=0.1
    )


def test_small_noise_changes_no_estimate():
    def by(speed):
        return LinkEstimates.of([("ann", record(seen(8, 2, sync=stall(speed))))], Links()).of_owner(
            "ann"
        )

    assert by(8.00e9) == by(8.05e9)
    assert by(8e9) != by(12e9)


def test_gbit():
    assert 8 * GBIT == 1e9
    assert np.isfinite(GBIT)
