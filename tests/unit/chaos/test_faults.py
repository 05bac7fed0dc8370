"""A fault of the campaign that cannot be undone is an error, not a silent end of the load."""

import threading
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from tests.chaos import faults
from tests.chaos.faults import Faults
from tests.chaos.schedule import Event


def test_a_daemon_that_does_not_start_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(faults, "START_S", 0.0)
    answer = CompletedProcess("", 1, "", "fatal: No trigger state file to recover\n")
    cluster = SimpleNamespace(exec=lambda *_, **__: answer)
    campaign = Faults(SimpleNamespace(cluster=cluster), load=None)
    expected = "slurmctld on ctld does not start: fatal: No trigger state file to recover"
    with pytest.raises(AssertionError, match=expected):
        campaign._start("slurmctld", "ctld")


def test_the_next_fault_on_a_killed_node_waits_until_it_has_started():
    """A container ends for good if one of its daemons is killed while it starts."""
    lock, answers, locked = threading.Lock(), [1, 1, 0], []

    def pgrep(*_, **__):
        locked.append(lock.locked())
        return CompletedProcess("", answers.pop(0))

    site = SimpleNamespace(
        cluster=SimpleNamespace(exec=pgrep, name="c"), hit={}, jobs=list, nodes=("g01", "g02"),
        lock=lambda _: lock, docker=lambda *_: None, disturb=lambda _: None,
        after_boot=lambda _: None,
    )  # fmt: skip
    event = Event(at=0.0, kind="node-kill", outage_s=0.0, pick=0.0, size=1.0)
    assert Faults(site, load=None).run(event) == "g01"
    assert locked == [True] * 3


def test_a_drain_whose_end_a_killed_slurmctld_has_lost_is_ended_again():
    words, lock = [], threading.Lock()
    cluster = SimpleNamespace(
        exec=lambda command, **_: words.append(command) or CompletedProcess("", 0)
    )
    site = SimpleNamespace(cluster=cluster, jobs=list, nodes=("g01",), lock=lambda _: lock)
    campaign = Faults(site, load=None)
    campaign.run(Event(at=0.0, kind="drain", outage_s=0.0, pick=0.0, size=1.0))
    resume = words[-1]
    assert resume == ["scontrol", "update", "nodename=g01", "state=resume"]
    campaign._release_again()
    assert words[-2:] == [resume, resume]
