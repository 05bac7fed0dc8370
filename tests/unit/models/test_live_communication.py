"""Cost of distance to live jobs: measured, by the links, by the curve."""

import pytest

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.communication import CommunicationError
from slurm_elastic.models.links import CommunicationCost, Links
from slurm_elastic.models.live_communication import LiveCommunication, key_of
from slurm_elastic.models.speedup import SpeedModel

STATED = SpeedupSettings(loss_in_node=0.0, loss_across_nodes=0.5)


def seen(gpus, nodes, racks, sync, kind="a100", steps=50):
    return Measurement(
        gpu_type=kind, gpus=gpus, nodes=nodes, racks=racks, samples_per_s=80.0, steps=steps,
        compute_s=1.0, sync_s=sync, reports=5,
    )  # fmt: skip


def live(*measurements, links=Links(), size=1e9, stated=STATED):  # noqa: B008 - frozen
    record = JobRecord(job_id=7, measurements=measurements, gradient_bytes=size)
    model = SpeedModel.fit(stated, measurements, CommunicationCost.of(record, links, stated.types))
    return LiveCommunication.of({7: record}, {7: model})


def test_where_it_ran_its_stall_counts_whatever_the_links_say():
    known = live(seen(8, 2, 2, sync=1.0), links=Links(spine=1e12))
    assert known.part("7", 8, (2, 2, 2)) == known.part("7", 8, (2, 2, 4)) == 0.5
    assert known.part("7", 1, (1, 1, 1)) == 1.0


def test_elsewhere_the_links_count_as_its_stalls_scale_them():
    near = live(seen(8, 1, 1, sync=0.0), links=Links(spine=1e9))
    assert near.part("7", 8, (2, 2, 2)) == pytest.approx(0.5)
    assert near.part("7", 8, (4, 4, 4)) == pytest.approx(1 / 2.5)
    twice = live(seen(8, 2, 2, sync=2.0), links=Links(spine=1e9))
    assert twice.part("7", 8, (4, 4, 4)) == pytest.approx(1 / 4)


def test_gpus_in_one_link_domain_use_its_links():
    known = live(seen(1, 1, 1, sync=0.0), links=Links(domain=1e12, node=1e9))
    assert known.part("7", 4, (1, 1, 1)) > 0.9
    assert known.part("7", 4, (1, 1, 2)) < 0.2


def test_without_links_its_curve_counts():
    assert live().part("7", 8, (1, 2, 2)) == pytest.approx(0.5)
    assert live(size=None).part("7", 8, (2, 2, 2)) == pytest.approx(0.25)
    assert live().part("7", 8, (1, 1, 1)) == 1.0


def test_types_can_be_asked_for():
    known = live(seen(8, 2, 2, 1.0), seen(8, 2, 2, 3.0, kind="v100", steps=9))
    assert known.part("7", 8, (2, 2, 2)) == known.part(key_of(7, "a100"), 8, (2, 2, 2)) == 0.5
    assert known.part(key_of(7, "v100"), 8, (2, 2, 2)) == 0.25


def test_what_cannot_be_is_refused_in_one_line():
    for name, words in (("8", "job 8 is not one of this round's"), ("VGG", "VGG names no job")):
        with pytest.raises(CommunicationError, match=words):
            live().part(name, 8, (2, 2, 2))
