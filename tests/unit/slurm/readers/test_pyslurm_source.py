"""pyslurm while slurmctld is silent: no other thread of the controller runs while it waits."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from slurm_elastic.slurm.readers.pyslurm_source import PyslurmSource
from slurm_elastic.slurm.scontrol import SlurmUnreachableError


class RPCError(Exception):
    pass


class Jobs:
    answers = True
    loads = 0

    @classmethod
    def load(cls) -> dict[int, object]:
        cls.loads += 1
        if not cls.answers:
            raise RPCError("Socket timed out")
        return {7: object()}


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PyslurmSource:
    Jobs.answers, Jobs.loads = True, 0
    module = types.ModuleType("pyslurm")
    module.__dict__.update(
        Jobs=Jobs, RPCError=RPCError, PyslurmError=RPCError, slurm_init=lambda: None
    )
    monkeypatch.setitem(sys.modules, "pyslurm", module)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "Slurmctld(primary) at ctld is $(cat {tmp_path}/is)"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return PyslurmSource()


def test_a_silent_slurmctld_is_asked_by_another_process(
    source: PyslurmSource, tmp_path: Path
) -> None:
    Jobs.answers = False
    with pytest.raises(SlurmUnreachableError, match="Socket timed out"):
        source.jobs()
    (tmp_path / "is").write_text("DOWN")
    for _ in range(3):
        with pytest.raises(SlurmUnreachableError, match="no slurmctld answers"):
            source.jobs()
    assert Jobs.loads == 1
    Jobs.answers = True
    (tmp_path / "is").write_text("UP")
    assert len(list(source.jobs())) == len(list(source.jobs())) == 1
    (tmp_path / "is").unlink()  # no longer asked
    assert len(list(source.jobs())) == 1
