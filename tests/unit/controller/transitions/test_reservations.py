"""One reservation of ours on a node, and none that stays."""

import time

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.transitions.reservations import Reservations
from slurm_elastic.core.cluster import Reservation
from slurm_elastic.slurm.scontrol import ScontrolError
from tests.support.controller.job_records import FakeScontrol, Log


@pytest.fixture
def scontrol():
    return FakeScontrol()


@pytest.fixture
def reservations(scontrol):
    return Reservations(scontrol, Config(), "selastic", Log())


def verbs(scontrol):
    return [c[0] for c in scontrol.calls]


def test_changes_on_the_same_nodes_share_one(reservations, scontrol):
    reservations.cover("selastic_1", {"n1", "n2"})
    assert reservations.on({"n2", "n3"}) == {"selastic_1"}
    assert reservations.on({"n3"}) == set()
    reservations.cover("selastic_1", {"n2", "n3"})
    assert scontrol.calls[-1] == ("update_reservation", "selastic_1", {"Nodes": "n1,n2,n3"})
    reservations.cover("selastic_1", {"n1"})
    assert len(scontrol.calls) == 2


def test_it_is_closed_until_a_job_may_start(reservations, scontrol):
    reservations.cover("selastic_1", {"n1"})
    assert "selastic" in scontrol.calls[0]
    reservations.open("selastic_1", "alice", {"n1"})
    reservations.open("selastic_1", "alice", {"n1"})
    reservations.open("selastic_1", "bob", {"n1"})
    users = [c[2]["Users"] for c in scontrol.calls if c[0] == "update_reservation"]
    assert users == ["alice,selastic", "alice,bob,selastic"]


def test_it_goes_with_its_last_change_even_if_slurm_says_later(reservations, scontrol):
    reservations.cover("selastic_1", {"n1"})
    reservations.keep({"selastic_1"})
    assert reservations
    scontrol.refuse = "Requested reservation is in use"
    reservations.keep(set())
    assert reservations
    scontrol.refuse = ""
    reservations.keep(set())
    assert not reservations
    assert verbs(scontrol)[-1] == "delete_reservation"


def test_one_that_is_gone_is_forgotten(reservations, scontrol):
    reservations.cover("selastic_1", {"n1"})
    scontrol.refuse = "Requested reservation is invalid"
    reservations.keep({"selastic_1"})  # not due: nothing is asked
    reservations.keep(set())
    assert not reservations


def test_what_an_earlier_life_left_behind_is_removed(reservations, scontrol):
    left = {"nodes": ("n1",), "start_time": 0.0, "end_time": 9e9}
    reservations.adopt(
        [
            Reservation(name="selastic_7", ours=True, **left),
            Reservation(name="maintenance", ours=False, **left),
        ]
    )
    reservations.keep(set())
    assert scontrol.calls == [("delete_reservation", "selastic_7")]


def test_a_refusal_reserves_nothing(reservations, scontrol):
    scontrol.refuse = "Requested reservation overlaps with another reservation"
    with pytest.raises(ScontrolError):
        reservations.cover("selastic_1", {"n1"})
    assert not reservations


def test_it_is_renewed_although_the_clock_was_set_back(reservations, scontrol, monkeypatch):
    reservations.cover("selastic_1", {"n1"})
    wall, steady = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: wall - 3600)
    monkeypatch.setattr(time, "monotonic", lambda: steady + Config().slurm.lease_s)
    reservations.keep({"selastic_1"})
    assert "EndTime" in scontrol.calls[-1][2]
