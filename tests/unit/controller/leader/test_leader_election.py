"""The lease as it is kept, with a slurmctld and a clock that the test turns."""

import threading

import pytest

from slurm_elastic.controller.leader.leader_election import LeaderElection, rival
from slurm_elastic.controller.leader.leader_lease import DURABLE_S, comment_of
from slurm_elastic.core.cluster import Reservation
from slurm_elastic.slurm.scontrol import NotActiveError, ScontrolError, SlurmUnreachableError
from tests.support.controller.job_records import Log

T = 30.0


def reservation(name, comment):
    return Reservation(name=name, nodes=(), start_time=0.0, end_time=0.0, comment=comment)


class Slurmctld:
    """Reads and writes of leases."""

    def __init__(self):
        self.kept, self.dead = {}, False

    def leases(self):
        self.answer()
        return tuple(reservation(n, c) for n, c in self.kept.items())

    def some_node(self):
        return "g1"

    def create_lease(self, name, *, node, comment):
        self.answer()
        if name in self.kept:
            raise ScontrolError("Error creating the reservation: Duplicate reservation name")
        self.kept[name] = comment

    def update_reservation(self, name, fields):
        self.answer()
        if name not in self.kept:
            raise ScontrolError("slurm_update error: Requested reservation is invalid")
        self.kept[name] = fields["Comment"]

    def delete_reservation(self, name):
        self.answer()
        self.kept.pop(name)

    def answer(self):
        if self.dead:
            raise SlurmUnreachableError("slurmctld: no answer")


@pytest.fixture
def slurm():
    return Slurmctld()


@pytest.fixture
def time():
    return [1000.0]


@pytest.fixture
def election(slurm, time):
    """Its thread does not beat by itself: a wait of T/6 is longer than any test."""
    made = LeaderElection(
        reader=slurm,
        writes=slurm,
        prefix="selastic_",
        address="h1:7321",
        takeover_s=T,
        log=Log(),
        clock=lambda: time[0],
    )
    yield made
    made._ending.set()


def stand_by(election, time, seconds):
    """Look every T/12 for so long, or until it is active."""
    for _ in range(int(seconds * 12 / T)):
        time[0] += T / 12
        if election.stand_by():
            return True
    return False


def test_without_any_lease_it_waits_makes_one_and_waits_until_that_lasts(election, slurm, time):
    assert not stand_by(election, time, T)
    assert slurm.kept == {}
    assert stand_by(election, time, T / 3)
    assert list(slurm.kept) == ["selastic_active_1"]
    assert "holder=h1:7321" in slurm.kept["selastic_active_1"]
    assert 0 < election.right() <= T / 2
    assert election.holds


def test_one_that_is_not_renewed_gives_no_right(election, slurm, time):
    stand_by(election, time, 2 * T)
    time[0] += T / 2
    with pytest.raises(NotActiveError, match="not renewed in time"):
        election.right()
    time[0] -= T / 2  # not even if the clock were wrong
    with pytest.raises(NotActiveError):
        election.right()
    assert "not renewed" in election.drop()
    election.stand_by()
    assert election.active_address == ""  # not itself any more
    slurm.kept["selastic_active_2"] = comment_of(holder="h2:7321", id_="b2", beat=1)
    assert not stand_by(election, time, T / 2)
    assert election.active_address == "h2:7321"


def test_it_takes_over_and_removes_what_was_before(election, slurm, time):
    slurm.kept["selastic_active_4"] = comment_of(holder="h2:7321", id_="b2", beat=9)
    assert stand_by(election, time, 2 * T)
    assert list(slurm.kept) == ["selastic_active_5"]
    assert election.generation == 5


def test_who_is_slower_goes_on_standing_by(election, slurm, time):
    stand_by(election, time, T)
    slurm.kept["selastic_active_1"] = comment_of(holder="h2:7321", id_="b2", beat=1)
    slurm.leases = lambda: ()  # it cannot see that yet
    stand_by(election, time, T / 6)
    assert "h2:7321" in slurm.kept["selastic_active_1"]
    assert not election.holds


def test_a_lease_that_slurmctld_forgets_gives_no_right(election, slurm, time):
    slurm.kept["selastic_active_1"] = comment_of(holder="h2:7321", id_="b2", beat=1, free=True)
    assert not stand_by(election, time, T / 12)
    slurm.kept["selastic_active_2"] = comment_of(holder="h3:7321", id_="c3", beat=1)
    assert not stand_by(election, time, T)
    assert not election.holds


def test_another_above_ends_it_at_once(election, slurm, time):
    stand_by(election, time, 2 * T)
    slurm.kept["selastic_active_2"] = comment_of(holder="h2:7321", id_="b2", beat=1)
    election.notice(slurm.leases())
    with pytest.raises(NotActiveError, match="h2:7321 has taken the lease"):
        election.right()


def test_given_back_it_is_free_and_gives_no_right(election, slurm, time):
    stand_by(election, time, 2 * T)
    election.give_back()
    assert slurm.kept["selastic_active_1"].endswith("state=free")
    with pytest.raises(NotActiveError):
        election.right()


@pytest.fixture
def quick(slurm):
    """One that is active, by its own clock and thread."""
    election = LeaderElection(
        reader=slurm, writes=slurm, prefix="s_", address="h1:1", takeover_s=6.0, log=Log()
    )
    election.was_lost = threading.Event()
    election.lost = election.was_lost.set
    slurm.kept["s_active_1"] = comment_of(holder="h2:1", id_="b2", beat=1, free=True)
    election.stand_by()
    election._claim._made -= DURABLE_S
    assert election.stand_by()
    yield election
    election._ending.set()


def test_a_lease_that_is_gone_is_lost_with_the_next_beat(quick, slurm):
    slurm.kept.clear()
    assert quick.was_lost.wait(30)
    with pytest.raises(NotActiveError, match="has lost the lease"):
        quick.right()


def test_a_loop_that_hangs_does_not_beat(quick):
    with quick.working():
        quick._busy_since -= 1000
        assert quick.was_lost.wait(30)
    assert any("hung" in line for line in quick._log.lines)


def test_one_that_is_configured_alone_sees_another():
    held = reservation("s_active_3", comment_of(holder="h2:1", id_="b", beat=1))
    free = comment_of(holder="h2:1", id_="b", beat=1, free=True)
    assert "another selasticd, at h2:1, holds s_active_3" in rival((held,))
    assert rival((reservation("s_active_4", free), held)) == ""
    assert rival(()) == ""
