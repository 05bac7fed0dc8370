"""The image of the container cluster does not depend on what tools leave in the tree."""

import io
import tarfile
from pathlib import Path

import pytest

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR  # puts clusterlib on the path

# isort: split

from clusterlib import context

assert CLUSTER_DIR.is_dir()


def test_what_compilers_and_linters_leave_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "PROJECT_DIR", tmp_path)
    for name in (
        "slurm_elastic/module.py",
        "slurm_elastic/__pycache__/module.cpython-313.pyc",
        "docs/examples/train.py",
        "docs/examples/.ruff_cache/CACHEDIR.TAG",
        "plugins/spank/elastic.so",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    content = io.BytesIO(context.project_archive("project"))
    with tarfile.open(fileobj=content) as archive:
        assert archive.getnames() == [
            "project/slurm_elastic/module.py",
            "project/docs/examples/train.py",
        ]
