"""A fault of the campaign that cannot be undone is an error, not a silent end of the load."""

from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest

from tests.chaos import faults
from tests.chaos.faults import Faults


def test_a_daemon_that_does_not_start_is_an_error_with_its_last_words(monkeypatch):
    monkeypatch.setattr(faults, "START_S", 0.0)
    answer = CompletedProcess("", 1, "", "fatal: No trigger state file to recover\n")
    cluster = SimpleNamespace(exec=lambda *_, **__: answer)
    campaign = Faults(SimpleNamespace(cluster=cluster), load=None)
    expected = "slurmctld on ctld does not start: fatal: No trigger state file to recover"
    with pytest.raises(AssertionError, match=expected):
        campaign._start("slurmctld", "ctld")
