"""`make demo`, and each of its options that damage a job."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.container_cluster.slurm_cluster import cluster_name
from tests.support.needs import lack

ROOT = Path(__file__).resolve().parents[2]
#: A cluster of its own: the demo wants an empty one.
NAME = f"{cluster_name()}-demo"
NO_DOCKER = 3

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1600)]


def demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contrib.demo", "--name", NAME, "--out", str(out), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False
    )
    if done.returncode == NO_DOCKER:
        lack("docker")
    print(done.stdout)
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stdout
    return done


def failed(done: subprocess.CompletedProcess[str]) -> list[str]:
    return re.findall(r"^  FAIL  ([^(\n]*?)(?: \(.*)?$", done.stdout, re.MULTILINE)


def containers() -> str:
    listed = ["docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={NAME}"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


def test_the_demo(tmp_path):
    done = demo(tmp_path)
    assert failed(done) == []
    assert done.returncode == 0, done.stderr
    for kind in ("grew", "shrank", "moved", "was preempted and resumed"):
        assert f"ok    a job {kind} (" in done.stdout
    assert (tmp_path / "timeline.png").stat().st_size > 20_000
    assert (tmp_path / "timeline.svg").exists()
    assert containers() == ""


def test_a_sample_that_the_job_leaves_out_is_noticed(tmp_path):
    done = demo(tmp_path, "--break", "skip-sample")
    assert done.returncode == 1
    assert failed(done) == [
        "gpt: every sample exactly once per epoch, no step twice",
        "gpt: losses equal an uninterrupted run's",
    ]
    assert "epoch 1: 1 samples never seen, 1 more than once" in done.stdout


def test_a_job_that_is_killed_is_noticed(tmp_path):
    done = demo(tmp_path, "--break", "kill-job")
    assert done.returncode == 1
    assert failed(done)[0] == "all jobs completed"
    assert "gpt ended CANCELLED" in done.stdout
    assert "ok    rigid jobs ran exactly once, undisturbed" in done.stdout
