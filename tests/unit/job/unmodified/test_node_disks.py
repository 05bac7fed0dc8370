"""Checkpoints in temporary directories, which each node has for itself."""

from pathlib import Path

import pytest

from slurm_elastic.job.unmodified import node_disks
from slurm_elastic.job.unmodified.node_disks import refusal_line, temporary_directory

HOME = "/home/a/.slurm-elastic"


@pytest.fixture(autouse=True)
def _file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the paths of the tests one of three file systems."""
    shared = ("/home", "/data")
    monkeypatch.setattr(
        node_disks, "_device", lambda path: 1 if str(path).startswith(shared) else 2
    )


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/tmp/run/ckpt.pt", "/tmp"),
        ("/var/tmp/ckpt.pt", "/var/tmp"),
        ("/dev/shm/a/step_1", "/dev/shm"),
        ("/local/7/out/ckpt.pt", "/local/7"),
        ("/scratch/7/ckpt.pt", "/scratch/7"),
        ("/tmpfiles/ckpt.pt", ""),
        ("/local/8/ckpt.pt", ""),
        ("/home/a/tmp/ckpt.pt", ""),
        ("/data/tmp/ckpt.pt", ""),
    ],
)
def test_temporary_directories_that_are_not_on_the_file_system_of_the_job(
    path: str, place: str
) -> None:
    env = {"TMPDIR": "/local/7", "SLURM_TMPDIR": "/scratch/7"}
    assert temporary_directory(path, (HOME,), env) == place


@pytest.mark.parametrize("variable", ["/data/tmp", "relative", ""])
def test_a_variable_that_names_no_directory_of_the_node(variable: str) -> None:
    env = {"TMPDIR": variable}
    assert temporary_directory("/data/tmp/ckpt.pt", (HOME,), env) == ""
    assert temporary_directory("/data/relative/ckpt.pt", (HOME,), env) == ""


def test_a_job_that_lives_in_a_temporary_directory(tmp_path: Path) -> None:
    """As on a cluster of one machine: there is no other place."""
    assert temporary_directory("/tmp/run/ckpt.pt", ("/tmp/job/.slurm-elastic",), {}) == ""


def test_the_refusal_names_the_checkpoints_and_the_remedy() -> None:
    line = refusal_line("/tmp/*.pt", written=1, state=f"{HOME}/a-7.json", job_id="7")
    assert line.startswith("--checkpoint /tmp/*.pt: nothing matches on this node")
    assert "has completed 1 checkpoint;" in line
    assert f"delete {HOME}/a-7.json" in line
    assert "ReqNodeList" not in line
    line = refusal_line("/tmp/*.pt", written=2, state=f"{HOME}/a-7.json", job_id="7", node="g02")
    assert "has completed 2 checkpoints, the last one on g02;" in line
    assert "scontrol update jobid=7 ReqNodeList=g02, then selastic release 7." in line
