"""The settle time, learned from pauses inside saves."""

from io import StringIO
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified.checkpoints import settle_time
from slurm_elastic.job.unmodified.checkpoints.checkpoint_formats import Evidence
from slurm_elastic.job.unmodified.checkpoints.settle_time import (
    FIRST_S,
    LACKING_S,
    LEAST_NFS_S,
    LEAST_S,
    SettleTime,
    least_settle_s,
)


def test_nothing_known_is_the_longest_wait() -> None:
    assert SettleTime().seconds() == FIRST_S


def test_three_times_the_longest_pause_and_never_below_the_minimum() -> None:
    settle = SettleTime()
    settle.learn(0.2)
    assert settle.seconds() == LEAST_S
    settle.learn(20)
    settle.learn(3)
    assert settle.seconds() == 60
    assert SettleTime(settle.pause_s).seconds() == 60, "kept over a requeue"


def test_a_pause_between_two_saves_is_not_waited_for_three_times() -> None:
    settle = SettleTime()
    settle.learn(86_400)
    assert settle.seconds() == 3 * settle_time.LONGEST_PAUSE_S


def test_a_missing_last_file_is_waited_for_longer() -> None:
    settle = SettleTime(0.0)
    assert settle.seconds(Evidence.LACKING) == LACKING_S
    assert settle.seconds(Evidence.WHOLE) == LEAST_S


MOUNTS = """\
1 0 8:1 / / rw - ext4 /dev/sda1 rw
2 1 0:5 / /home rw shared:1 - nfs4 server:/home rw
3 2 0:6 / /home/scratch rw - lustre mds:/scratch rw
4 1 0:7 / /data\\040disk rw master:2 - nfs server:/data rw
torn
"""


@pytest.mark.parametrize(
    ("pattern", "hosts", "least_s"),
    [
        ("/home/alice/ckpt/*.pt", 2, LEAST_NFS_S),
        ("/home/alice/ckpt/*.pt", 1, LEAST_S),
        ("/home/scratch/ckpt/*.pt", 2, LEAST_S),
        ("/homes/ckpt/*.pt", 2, LEAST_S),
        ("/data disk/[ab]/*.pt", 2, LEAST_NFS_S),
        ("/tmp/*.pt", 2, LEAST_S),
    ],
)
def test_several_hosts_through_nfs(
    monkeypatch: pytest.MonkeyPatch, pattern: str, hosts: int, least_s: float
) -> None:
    monkeypatch.setattr(settle_time, "open", lambda *_, **__: StringIO(MOUNTS), raising=False)
    assert least_settle_s(pattern, hosts) == least_s


def test_without_a_list_of_mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(settle_time, "open", refuse, raising=False)
    assert least_settle_s(f"{tmp_path}/*", 2) == LEAST_S
