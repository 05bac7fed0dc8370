"""Writes need the right to write, and end when it ends."""

import time

import pytest

from slurm_elastic.slurm.scontrol import NotActiveError, Scontrol, SlurmUnreachableError


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
