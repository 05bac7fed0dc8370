"""Nodes that are lost or have just come back."""

from __future__ import annotations

import pytest

from slurm_elastic.slurm.readers import lost_nodes
from slurm_elastic.slurm.readers.lost_nodes import LostNodes


@pytest.mark.parametrize("lost", ["DOWN", "DOWN+NOT_RESPONDING", "IDLE+FAIL", "DOWN+DRAIN"])
def test_a_node_that_was_lost_counts_as_lost_until_its_lost_runs_are_killed(lost, monkeypatch):
    now = 100.0
    monkeypatch.setattr(lost_nodes.time, "monotonic", lambda: now)
    seen = LostNodes()
    others = {"n2": "IDLE", "n3": "IDLE+DRAIN", "n4": "IDLE+POWERED_DOWN"}
    assert seen.look({"n1": lost, **others}) == {"n1"}
    now += 1000.0
    assert seen.look({"n1": lost, **others}) == {"n1"}
    now += 14.0
    assert seen.look({"n1": "IDLE", **others}) == {"n1"}
    now += 2.0
    assert seen.look({"n1": "IDLE", **others}) == frozenset()
