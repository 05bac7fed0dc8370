"""Guards that freeze and kill ranks, without Slurm: each node's guard is a local shell."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import cast

import pytest

from slurm_elastic.job import srun
from slurm_elastic.job.launch import RankLaunch
from slurm_elastic.job.signals import rank_signals
from slurm_elastic.job.signals.rank_signals import RankSignals
from tests.support.patience import PATIENCE_S

MARK = f"guards.{os.getpid()}"


class Allocation:
    here = "n1"


class Launch:
    """Launch on one node, for `RankSignals`."""

    hosts = ((None, ["n1"]),)
    allocation = Allocation()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(100)"],
        env={**os.environ, "SLURM_ELASTIC_STEP": MARK},
    )
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankSignals]:
    def local(_nodes: object, script: str, *arguments: str, **_: object) -> list[str]:
        return ["sh", "-c", script, "esrun", *arguments]

    monkeypatch.setattr(srun, "helper_command", local)
    launch = cast("RankLaunch", Launch())
    signals = RankSignals(launch)
    signals.mark = MARK
    yield signals
    signals.unguard()


def wait_for_state(process: subprocess.Popen[bytes], state: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        with open(f"/proc/{process.pid}/status", encoding="utf-8") as file:  # noqa: PTH123
            if f"State:\t{state}" in file.read():
                return
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ranks_stand_when_freeze_returns_and_go_on_after_unguard(
    signals: RankSignals, rank: subprocess.Popen[bytes]
) -> None:
    wait_for_state(rank, "S")
    signals.guard()
    assert signals.freeze()
    wait_for_state(rank, "T")
    signals.unguard()
    wait_for_state(rank, "S")


def test_ranks_go_on_although_their_guard_was_killed(
    signals: RankSignals, rank: subprocess.Popen[bytes]
) -> None:
    wait_for_state(rank, "S")
    signals.guard()
    assert signals.freeze()
    (guard,) = signals._guards
    guard._srun.kill()
    guard._srun.wait()
    signals.unguard()
    wait_for_state(rank, "S")


def test_armed_guards_kill_frozen_ranks_at_sigterm(
    signals: RankSignals, rank: subprocess.Popen[bytes]
) -> None:
    wait_for_state(rank, "S")
    signals.guard()
    assert signals.freeze()
    signals.arm()
    (guard,) = signals._guards
    time.sleep(0.3)
    guard._srun.send_signal(signal.SIGCONT)
    guard._srun.send_signal(signal.SIGTERM)
    assert rank.wait(PATIENCE_S) == -signal.SIGKILL


def test_without_a_guard_nothing_is_frozen(
    signals: RankSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not signals.freeze()
    monkeypatch.setattr(rank_signals, "_FREEZE_S", 0.5)
    monkeypatch.setattr(srun, "helper_command", lambda *_, **__: ["sh", "-c", "exit 1"])
    signals.guard()
    assert not signals.freeze()
