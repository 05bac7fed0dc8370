"""The name by which an esrun sees that another one of its job runs."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job.environment.sole_esrun import SecondEsrunError, claim_job


def test_one_at_a_time_in_a_job(tmp_path: Path) -> None:
    first = claim_job("slurm-7", str(tmp_path))
    assert first is not None
    with pytest.raises(SecondEsrunError, match=f"process {os.getpid()}"):
        claim_job("slurm-7", str(tmp_path))
    for other in (claim_job("slurm-8", str(tmp_path)), claim_job("slurm-7", str(tmp_path.parent))):
        assert other is not None
        other.close()
    first.close()
    again = claim_job("slurm-7", str(tmp_path))
    assert again is not None
    again.close()


def test_another_user_cannot_prevent_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "x" * 200  # longer than the kernel allows
    taken = claim_job(name, str(tmp_path / "none"))
    assert taken is not None
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert claim_job(name, str(tmp_path / "none")) is None
    taken.close()
