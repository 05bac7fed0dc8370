"""Which Slurm `contrib/cluster/cluster up` puts into a cluster, and what it says otherwise."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR  # puts clusterlib on the path

# isort: split

from clusterlib.layout import Layout
from clusterlib.progress import ClusterError
from clusterlib.slurm_build import DEBIAN_RELEASE, VARIABLE, SlurmBuild, choose
from clusterlib.slurmconf import cgroup_conf

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


@pytest.fixture
def trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    paths = {
        release: tmp_path / f"slurm-{release}-trixie-{ARCHITECTURE}.tar.xz"
        for release in ("25.11.7", "25.11.10", "25.5.8")
    }
    for path in (*paths.values(), tmp_path / "slurm-23.11.1-trixie-sparc.tar.xz"):
        path.touch()
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'nothing'}:{tmp_path}")
    return paths


def test_debians_package_unless_another_release_is_named(trees: dict[str, Path]) -> None:
    assert choose() == choose(DEBIAN_RELEASE) == choose("24.11") == SlurmBuild()


def test_a_tree_by_release_or_by_series(trees: dict[str, Path]) -> None:
    assert choose("25.11.7") == SlurmBuild("25.11.7", tree=trees["25.11.7"])
    assert choose("25.11").release == "25.11.10"  # numbers are compared, not text


def test_an_archive_that_is_named(trees: dict[str, Path], tmp_path: Path) -> None:
    tree = trees["25.5.8"]
    assert choose(tree=tree) == SlurmBuild("25.5.8", tree=tree)
    source = tmp_path / "slurm-26.05.3.tar.bz2"
    source.touch()
    assert choose("26.05", source=source) == SlurmBuild("26.05.3", source=source)
    with pytest.raises(ClusterError, match=r"it is 26\.05\.3, and --slurm says 25\.11"):
        choose("25.11", source=source)
    unnamed = tmp_path / "slurm.tar"
    unnamed.touch()
    assert choose("26.05.1", tree=unnamed).release == "26.05.1"
    with pytest.raises(ClusterError, match="does not say which release it is: add --slurm"):
        choose(tree=unnamed)


def test_what_cannot_be_had_is_one_line_with_the_remedy(trees: dict[str, Path]) -> None:
    def said(*options: str) -> str:
        command = [CLUSTER_DIR / "cluster", "--name", "none", "build", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        return done.stderr

    assert "has no tree of it: set SLURM_TREES, or name --slurm-tree FILE" in said(
        "--slurm", "22.05.8"
    )
    assert "no tree of it" in said("--slurm", "23.11.1")  # built for another machine
    assert "expected a release, for example 25.11.7" in said("--slurm", "new")
    assert "/no/where.tar: no such file" in said("--slurm-tree", "/no/where.tar")
    assert "omit it" in said("--pyslurm")


def test_slurmd_of_every_release_accepts_cgroup_conf() -> None:
    assert "disabled" in cgroup_conf(Layout())
    assert "disabled" in cgroup_conf(Layout(slurm="24.05.0"))
    assert "cgroup/v1" in cgroup_conf(Layout(slurm="23.11.11"))
