"""Writes need the right to write, and end when it ends."""

import time

import pytest

from slurm_elastic.slurm.scontrol import NotActiveError, Scontrol, SlurmUnreachableError
from tests.support.controller.job_records import job


@pytest.fixture
def cancelled(tmp_path, monkeypatch):
    """A `scancel` that notes its words, one a line."""
    path = tmp_path / "scancel"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >>{tmp_path}/cancelled\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return lambda: (tmp_path / "cancelled").read_text().splitlines()


@pytest.mark.parametrize(
    ("name", "filters"),
    [
        ("train+1", ["--name=train+1"]),
        ("a, b *+1", ["--name=a, b *+1"]),
        ("two\nlines+1", []),
        ("\udcff+1", []),
    ],
)
def test_another_job_that_has_got_the_id_of_a_companion_is_not_cancelled(cancelled, name, filters):
    Scontrol().cancel(job(name=name))
    assert cancelled() == ["--quiet", "--user=2001", *filters, "7"]


def test_a_companion_that_has_ended_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    scancel = tmp_path / "scancel"
    scancel.write_text("#!/bin/sh\nexit 1\n")
    scancel.chmod(0o755)
    Scontrol().cancel(job())
    unreachable = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    scancel.write_text(f"#!/bin/sh\necho '{unreachable}' >&2\nexit 1\n")
    with pytest.raises(SlurmUnreachableError):
        Scontrol().cancel(job())


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A `scontrol` that notes its words; the word `slow` takes it long, others are refused."""
    path = tmp_path / "scontrol"
    path.write_text(
        '#!/bin/sh\ncase "$1" in create|delete|release|requeue|uhold|update) ;;'
        ' *) echo "invalid keyword: $1"; exit 1;; esac\n'
        f'echo "$@" >>{tmp_path}/calls\ncase "$*" in *slow*) exec sleep 60;; esac\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "calls").touch()
    return lambda: (tmp_path / "calls").read_text().splitlines()


def test_alone_everything_is_written(calls):
    Scontrol().delete_reservation("x")
    assert calls() == ["delete ReservationName=x"]


def test_without_the_right_nothing_is(calls):
    def none():
        raise NotActiveError("not renewed")

    scontrol = Scontrol(right=none)
    with pytest.raises(NotActiveError, match="not renewed"):
        scontrol.delete_reservation("x")
    assert calls() == []


def test_a_call_ends_with_the_right(calls):
    scontrol, began = Scontrol(right=lambda: 0.3), time.monotonic()
    with pytest.raises(SlurmUnreachableError, match=r"no answer in 0\.3 s"):
        scontrol.delete_reservation("slow")
    assert time.monotonic() - began < 50
    assert len(calls()) == 1
    scontrol = Scontrol(right=lambda: 20.0)
    scontrol.delete_reservation("x")
    assert len(calls()) == 2


def test_power_of_nodes(calls):
    scontrol = Scontrol()
    scontrol.power_down("g[01-03]")
    scontrol.power_up("g02")
    assert calls() == [
        "update NodeName=g[01-03] State=POWER_DOWN",
        "update NodeName=g02 State=POWER_UP",
    ]
