"""Words of a batch script that depend on the size of its job."""

import doctest
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified import size_words
from slurm_elastic.job.unmodified.size_words import read_batch_script, size_word


def test_examples() -> None:
    assert doctest.testmod(size_words).failed == 0


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("#SBATCH --gpus=2\nesrun python train.py\n", ""),
        ("# SLURM_NTASKS is not needed\nesrun python train.py", ""),
        ("esrun python train.py --accum $((64 / SLURM_NTASKS))", "SLURM_NTASKS"),
        ("G=${SLURM_GPUS_ON_NODE:-1}", "SLURM_GPUS_ON_NODE"),
        ("hosts=$(scontrol show hostnames $SLURM_JOB_NODELIST)", "SLURM_JOB_NODELIST"),
        ("n=$(nvidia-smi -L | wc -l)", "nvidia-smi"),
        ("n=$(echo $CUDA_VISIBLE_DEVICES | tr , ' ' | wc -w)", "CUDA_VISIBLE_DEVICES"),
        ("echo $SLURM_JOB_ID $SLURM_ARRAY_TASK_ID", ""),
    ],
)
def test_words_of_a_batch_script_that_depend_on_the_size(script: str, word: str) -> None:
    assert size_word(script) == word


def test_the_script_is_read_from_slurmctld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool = tmp_path / "scontrol"
    tool.write_text('#!/bin/sh\n[ "$*" = "write batch_script 7 -" ] && echo "#!/bin/bash"\n')
    tool.chmod(0o755)
    assert read_batch_script(7) == "#!/bin/bash\n"
    assert read_batch_script(8) is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert read_batch_script(7) is None
