"""The name by which an esrun sees that another one of its job runs."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job.environment.sole_esrun import SecondEsrunError, lock_job


def test_one_at_a_time_in_a_job(tmp_path: Path) -> None:
    first = lock_job("slurm-7", str(tmp_path))
    assert first is not None
    with pytest.raises(SecondEsrunError, match=f"process {os.getpid()}"):
        lock_job("slurm-7", str(tmp_path))
    for other in (lock_job("slurm-8", str(tmp_path)), lock_job("slurm-7", str(tmp_path.parent))):
        assert other is not None
        other.close()
    first.close()
    again = lock_job("slurm-7", str(tmp_path))
    assert again is not None
    again.close()


def test_another_user_cannot_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "x" * 200  # longer than the kernel allows
    taken = lock_job(name, str(tmp_path / "none"))
    assert taken is not None
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert lock_job(name, str(tmp_path / "none")) is None
    taken.close()
