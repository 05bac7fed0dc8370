"""Words of a batch script that depend on the size of its job."""

import doctest
import os
from pathlib import Path

import pytest

from slurm_elastic.job.unmodified import size_words
from slurm_elastic.job.unmodified.size_words import called_scripts, read_batch_script, size_word


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


def process(proc: Path, pid: int, parent: int, directory: Path, *words: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a b) c) S {parent} 1 1")
    (folder / "cmdline").write_text("\0".join([*words, ""]))
    (folder / "cwd").symlink_to(directory)


def test_files_that_choose_the_command_beside_the_batch_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, run, proc = (tmp_path / name for name in ("home", "run", "proc"))
    home.mkdir()
    run.mkdir()
    (home / "settings.sh").write_text("A=$((64 / SLURM_NTASKS))\n. ./more.sh; source settings.sh\n")
    (run / "run.sh").write_text("source $HOME/settings.sh\nesrun python train.py --accum $A\n")
    (run / "more.sh").write_text("source again.sh; source more.sh\n")
    os.mkfifo(run / "again.sh")
    (run / "python").write_bytes(b"\x7fELF\0")
    batch = "#!/bin/csh\n  bash run.sh x\nif true; then source missing.sh; source $(f)/a $NO/b; fi"
    (run / "slurm_script").write_text(batch)
    process(proc, 9, 8, run, "python", "esrun")
    process(proc, 8, 7, run, "/bin/bash", "run.sh", "x", "", "no such file")
    process(proc, 7, 6, run, "python", "slurm_script")
    process(proc, 6, 5, run, "slurmstepd: [12.batch]", "run.sh")
    monkeypatch.chdir(run)
    monkeypatch.setenv("HOME", str(home))
    files = called_scripts(batch, 9, proc=proc)
    assert [Path(file.path).name for file in files] == ["run.sh", "settings.sh", "more.sh"]
    assert [size_word(file.text) for file in files] == ["", "SLURM_NTASKS", ""]
    assert called_scripts("source settings.sh", 1, proc=tmp_path / "none") == []
    (found,) = called_scripts("x=1; . '~/settings.sh'", 1, proc=tmp_path / "none")[:1]
    assert found.path == str(home / "settings.sh")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("make", "train"), "Makefile"),
        (("/usr/bin/gmake", "-j"), "GNUmakefile"),
        (("/usr/bin/python3", "-u", "/opt/bin/snakemake", "-c1"), "workflow/Snakefile"),
        (("make", "-f", "rules.mk"), "rules.mk"),
        (("python", "train.py", "make"), ""),
    ],
)
def test_rules_that_choose_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = "train:\n\tesrun python train.py --accum $$((8 / $$SLURM_GPUS_ON_NODE))\n"
    path = tmp_path / (name or "Makefile")
    path.parent.mkdir(exist_ok=True)
    path.write_text(rule)
    process(tmp_path / "proc", 9, 8, tmp_path, "python", "esrun")
    process(tmp_path / "proc", 8, 7, tmp_path, *words)
    process(tmp_path / "proc", 7, 6, tmp_path, "slurmstepd: [12.batch]")
    files = called_scripts("make train", 9, proc=tmp_path / "proc")
    assert [size_word(file.text) for file in files] == ["SLURM_GPUS_ON_NODE"] * bool(name)
    for line in ("-include none.mk rules.inc", 'include: "rules.inc"', "import 'rules.inc'"):
        path.write_text(f"{line}\n")
        (tmp_path / "rules.inc").write_text(rule)
        texts = [file.text for file in called_scripts("make train", 9, proc=tmp_path / "proc")]
        assert (rule in texts) is bool(name)
