"""Modules beside a script are read where it imports them."""

import doctest
import os
from pathlib import Path

from slurm_elastic.job.launchers import local_imports as module
from slurm_elastic.job.launchers.local_imports import local_imports


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0


def texts(folder: Path, source: str) -> list[str]:
    return sorted(local_imports([(str(folder / "train.py"), source)]))


def test_modules_and_packages_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .one import a as b, two")
    (tmp_path / "pkg" / "one.py").write_text("import pkg, train")
    (tmp_path / "pkg" / "two.py").write_text("from train import x  # 2")
    source = "import os, pkg as p\nfrom torch import nn"
    assert texts(tmp_path, source) == ["from .one import a as b, two", "import pkg, train"]
    assert "from train import x  # 2" in texts(tmp_path, "from pkg import (\n    one,\n    two,\n)")


def test_files_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "folder.py").mkdir()
    for number in range(60):
        (tmp_path / f"m{number}.py").write_text(f"import m{number + 1}")
    assert texts(tmp_path, "import pipe, loop, folder") == []
    assert len(texts(tmp_path, "import m0")) == 50
