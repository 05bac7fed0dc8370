"""A torch that is missing or too old is named in one line, with the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TAIL = ", in the build for your GPUs (https://pytorch.org); esrun --checkpoint needs none"


def run(program: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))} | environment
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("first", ["", "import torch; "])
@pytest.mark.parametrize("variables", [{}, {"SLURM_ELASTIC_FASTSTART": "0"}])
def test_a_torch_that_is_too_old(tmp_path: Path, first: str, variables: dict[str, str]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.5.1+cu124'\n")
    done = run(f"{first}import slurm_elastic.training", tmp_path, **variables)
    assert done.returncode == 1
    assert done.stderr == (
        f"slurm-elastic: torch 2.5.1+cu124 is invalid: expected 2.6 or newer{TAIL}\n"
    )


@pytest.mark.parametrize("module", ["training", "integrations.transformers"])
def test_without_torch(module: str) -> None:
    program = f"import sys; sys.modules['torch'] = None; import slurm_elastic.{module}"
    done = run(program)
    assert done.returncode == 1
    assert done.stderr == (
        f"slurm-elastic: torch is not installed in {sys.prefix}: install 2.6 or newer{TAIL}\n"
    )


def test_a_script_can_do_without_the_library() -> None:
    program = """
import sys
sys.modules["torch"] = None
try:
    import slurm_elastic.training
except ImportError:
    print("by hand")
"""
    done = run(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "by hand\n", "")


@pytest.mark.parametrize("version", ["2.6.0a0+ecf3bae40a.nv25.01", "2.10.0", "3.0"])
def test_builds_of_vendors_and_later_releases_are_accepted(tmp_path: Path, version: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    program = "from slurm_elastic.training.faststart import import_torch"
    # The rest of the library needs the real torch.
    done = run(program, tmp_path)
    assert "is invalid" not in done.stderr
    assert "slurm-elastic:" not in done.stderr
