"""State of ended jobs is removed by a later one, and nothing else."""

import os
import sys
from pathlib import Path

import pytest

from slurm_elastic.job.environment.state_cleanup import remove_old_state

DAY_S = 86400.0
NOW_S = 1_800_000_000.0


def state(tmp_path: Path, name: str, *, days: float = 2.0) -> Path:
    path = tmp_path / ".slurm-elastic" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    os.utime(path, (NOW_S - days * DAY_S, NOW_S - days * DAY_S))
    return path


def clean(tmp_path: Path, *listed: str, known: bool = True) -> None:
    remove_old_state(
        [str(tmp_path / ".slurm-elastic")],
        "prod-9",
        now=NOW_S,
        listed=lambda: frozenset(listed) if known else None,
    )


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / ".slurm-elastic").glob("*"))


def test_state_of_jobs_that_slurm_does_not_list_is_removed(tmp_path: Path) -> None:
    for name in ("prod-7.json", "prod-7.trained", "prod-7.0.1.rendezvous", "prod-8.json"):
        state(tmp_path, name)
    clean(tmp_path, "8", "9")
    assert left(tmp_path) == ["prod-8.json"]
    clean(tmp_path, "9")
    assert not (tmp_path / ".slurm-elastic").exists()


def test_what_may_still_be_needed_stays(tmp_path: Path) -> None:
    state(tmp_path, "prod-9.json", days=90)  # the job's own
    state(tmp_path, "other-7.json", days=90)  # of another cluster, whose jobs are not known here
    state(tmp_path, "prod-7.json", days=90)
    state(tmp_path, "prod-7.trained", days=0.5)  # one recent file: the job may just have ended
    state(tmp_path, "notes.txt", days=90)
    before = left(tmp_path)
    clean(tmp_path)
    assert left(tmp_path) == before


def test_kept_checkpoints_stay(tmp_path: Path) -> None:
    kept = state(tmp_path, "kept/prod-7/before-rehearsal/ckpt.pt", days=90)
    empty = tmp_path / ".slurm-elastic" / "kept" / "prod-6"
    empty.mkdir()
    state(tmp_path, "prod-6.json")
    state(tmp_path, "prod-7.json")
    clean(tmp_path)
    assert kept.exists()
    assert not empty.exists()
    assert left(tmp_path) == ["kept"]


def test_nothing_is_removed_where_slurm_does_not_answer(tmp_path: Path) -> None:
    state(tmp_path, "prod-7.json")
    clean(tmp_path, known=False)
    assert left(tmp_path) == ["prod-7.json"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "prod-7.json").write_text("{}")
    os.utime(outside / "prod-7.json", (NOW_S - 90 * DAY_S, NOW_S - 90 * DAY_S))
    (tmp_path / ".slurm-elastic").symlink_to(outside)
    clean(tmp_path)
    assert (outside / "prod-7.json").exists()


@pytest.mark.parametrize(("code", "expected"), [(0, []), (1, ["prod-7.json"])])
def test_squeue_is_asked_for_all_jobs_of_the_user_on_this_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: list[str]
) -> None:
    state(tmp_path, "prod-7.json")
    state(tmp_path, "prod-8.json")
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "assert not {'SQUEUE_STATES', 'SLURM_CLUSTERS'} & os.environ.keys()\n"
        "assert '--me' in sys.argv and '--states=all' in sys.argv\n"
        f"print('8'); sys.exit({code})\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SQUEUE_STATES", "running")
    monkeypatch.setenv("SLURM_CLUSTERS", "other")
    remove_old_state([str(tmp_path / ".slurm-elastic")], "prod-9", now=NOW_S)
    assert left(tmp_path) == [*expected, "prod-8.json"]
