"""Rehearsals under any order of events: the checkpoint of before is never lost."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.job.script_job import ScriptJob

OLD = "before the rehearsal"

#: Behaviour of the restarted script, and the end of its attempt.
DEEDS = st.sampled_from(("read", "write", "replace", "delete", "finish a save"))
ENDS = st.sampled_from((0, 1, 137, "slurm", "esrun killed"))
ATTEMPTS = st.lists(st.tuples(st.lists(DEEDS, max_size=5), ENDS), min_size=1, max_size=4)


def act(job: ScriptJob, deed: str, number: int) -> None:
    file = job.home / "ckpt.pt"
    if deed == "read" and file.exists():
        file.read_text()
    elif deed == "write":
        file.write_text(f"written {number}")
    elif deed == "replace":
        (job.home / "x.tmp").write_text(f"replaced {number}")
        (job.home / "x.tmp").rename(file)
    elif deed == "delete":
        file.unlink(missing_ok=True)
    elif deed == "finish a save":
        job.now += 50
        job.settle()


def old_exists(home: Path) -> bool:
    """Return whether a file of the old content's size exists; reading would count as a resume."""
    files = [p for p in home.rglob("*") if p.is_file() and "r-7.json" not in p.name]
    return any(path.stat().st_size == len(OLD) for path in files)


@settings(max_examples=60)
@given(saves=st.integers(1, 3), by_rename=st.booleans(), attempts=ATTEMPTS)
def test_the_kept_checkpoint_exists_until_the_script_is_proven(
    saves: int, by_rename: bool, attempts: list[tuple[list[str], int | str]]
) -> None:
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder), saves, by_rename, attempts)
    finally:
        ScriptJob.close_all()


def check(
    home: Path, saves: int, by_rename: bool, attempts: list[tuple[list[str], int | str]]
) -> None:
    first = ScriptJob(home)
    for number in range(saves):
        first.now += 100
        name = "x.tmp" if by_rename else "ckpt.pt"
        (home / name).write_text(OLD if number == saves - 1 else f"earlier {number}")
        (home / name).rename(home / "ckpt.pt")
        first.settle()
    first.order("notice", 1, rehearsal=True)
    report = first.finish_copies()
    assert (report.phase, report.rehearsal) == ("saved", "able")
    first.watch.end_attempt(None)
    for run, (deeds, end) in enumerate(attempts, start=1):
        # A script writes in one manner: links are made only where it replaced each time.
        job = ScriptJob(home, run=run)
        for number, deed in enumerate(deeds):
            act(job, "replace" if by_rename and deed == "write" else deed, 10 * run + number)
            if job.finish_copies().proven:
                break
            assert old_exists(home)
        if end != "esrun killed":
            job.watch.end_attempt(None if end == "slurm" else int(end))
        proven = job.finish_copies().proven
        if proven or (end == 0 and "read" in deeds):
            return
        assert old_exists(home)
        if end == 0:
            return  # the job is complete
