"""Ranks that each write the whole checkpoint and do not listen train alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_elastic.job.launchers import lone_ranks
from slurm_elastic.job.launchers.lone_ranks import trains_alone
from slurm_elastic.job.launchers.nested_launch import RankProcess, step_processes
from slurm_elastic.job.slurm_env import STEP_VARIABLE
from tests.support.patience import PATIENCE_S

BYTES = 100_000
#: Writes so many bytes; listens if there is a second argument.
RANK = """
import os, socket, sys
open(os.devnull, "wb").write(bytes(int(sys.argv[1])))
server = socket.create_server(("", 0)) if sys.argv[2:] else None
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def ranks(*words: str) -> Iterator[dict[int, RankProcess]]:
    """Run a rank with each of these arguments; yields the processes of the step."""
    mark = f"lone.{os.getpid()}"
    env = {**os.environ, STEP_VARIABLE: mark}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *word.split()],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for word in words
    ]  # fmt: skip
    try:
        for rank in started:
            assert rank.stdout is not None
            assert rank.stdout.readline() == b"ready\n"
        processes = step_processes(mark)
        assert len(processes) >= len(words)
        yield processes
    finally:
        for rank in started:
            rank.communicate(timeout=PATIENCE_S)


def test_ranks_that_write_the_same_train_alone() -> None:
    with ranks(str(BYTES), str(BYTES)) as processes:
        assert trains_alone(processes, BYTES)
        assert not trains_alone(processes, 10 * BYTES), "they have not written all of it"
        assert not trains_alone(processes, 100), "too small to tell"


def test_one_rank_shows_it_where_the_others_run_on_other_hosts() -> None:
    with ranks(str(BYTES)) as processes:
        assert trains_alone(processes, BYTES)


@pytest.mark.parametrize(
    "words", [(f"{BYTES}", "1"), (f"{BYTES} listen", f"{BYTES}"), (f"{BYTES} listen",)]
)
def test_others_do_not(words: tuple[str, ...]) -> None:
    with ranks(*words) as processes:
        assert not trains_alone(processes, BYTES)


def test_where_the_kernel_tells_nothing_nothing_is_said(tmp_path: Path) -> None:
    with ranks(str(BYTES), str(BYTES)) as processes:
        assert not trains_alone(processes, BYTES, tmp_path)


def test_what_processes_below_a_rank_write_is_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lone_ranks, "_bytes_written", lambda pid, proc: BYTES // 2)
    monkeypatch.setattr(lone_ranks, "_listens", lambda pids, proc: False)
    parents = {11: 1, 12: 11, 21: 1, 22: 21}
    processes = {pid: RankProcess(parent, ("python",), "") for pid, parent in parents.items()}
    assert trains_alone(processes, BYTES)
    del processes[22]
    assert not trains_alone(processes, BYTES)
