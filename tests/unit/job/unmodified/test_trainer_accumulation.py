"""A script with transformers' Trainer keeps its size where its accumulation is set in its code."""

import argparse
import doctest
import pickle
import zipfile
from pathlib import Path

import pytest

from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.unmodified import trainer_accumulation
from slurm_elastic.job.unmodified.fixed_accumulation import FixedAccumulation
from tests.support.job.script_job import ScriptJob

IN_CODE = "args = TrainingArguments(gradient_accumulation_steps=4)"
#: As in the examples of transformers.
PARSED = (
    "parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))\n"
    "data.map(f, num_proc=8)\nlogger.warning(f'n_gpu: {training_args.n_gpu}')\n"
    "total = self.args.eval_batch_size * self.args.world_size"
)


def test_examples() -> None:
    assert doctest.testmod(trainer_accumulation).failed == 0


def save(home: Path, steps: object = 4, max_steps: object = -1) -> Path:
    """Write what esrun reads of a checkpoint of the Trainer."""
    folder = home / "checkpoint-60"
    folder.mkdir(exist_ok=True)
    arguments = argparse.Namespace(gradient_accumulation_steps=steps, max_steps=max_steps)
    with zipfile.ZipFile(folder / "training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", pickle.dumps(arguments, protocol=2))
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def needed(
    home: Path, source: str = "", words: str = "python train.py", *, steps: int = 4, batch: str = ""
) -> int:
    (home / "train.py").write_text(source)
    check = FixedAccumulation(parse(["--checkpoint", "c", *words.split()]), lambda: [batch])
    return check.needed_micro_batches(str(save(home, steps)), 1)


def test_an_accumulation_in_the_code_or_by_default_keeps_the_size(home: Path) -> None:
    assert needed(home, IN_CODE) == 4
    assert needed(home, "args = TrainingArguments('out')", steps=1) == 1
    assert needed(home, PARSED, "python train.py --num_train_epochs 3", steps=1) == 1
    assert needed(home, IN_CODE, "--micro-batches 4 python train.py") == 4, "the script ignores it"
    assert needed(home, IN_CODE, "--micro-batches script python train.py") == 0


@pytest.mark.parametrize(
    "source",
    [
        "TrainingArguments(gradient_accumulation_steps=8 // int(os.environ['WORLD_SIZE']))",
        "n = torch.cuda.device_count()\nTrainingArguments(per_device_train_batch_size=64 // n)",
        "n = dist.get_world_size()\nTrainingArguments(gradient_accumulation_steps=8 // n)",
        "TrainingArguments(accelerator_config={'split_batches': True})",
        "TrainingArguments(gradient_accumulation_steps=int(os.environ[SLURM_ELASTIC_ACCUMULATION]))",
        "import mine",  # sets it, perhaps
        "",
    ],
)
def test_a_script_that_may_adapt_its_batch_is_resized(home: Path, source: str) -> None:
    assert needed(home, source) == 0


@pytest.mark.parametrize(
    ("words", "is_held"),
    [
        ("torchrun --standalone --nproc_per_node=gpu train.py", True),
        ("accelerate launch --num_processes 4 train.py --seed 1", True),
        ("python -m torch.distributed.run --nnodes=1 --nproc_per_node=2 train.py", True),
        ("python train.py --world_size 2", False),
        ("bash -c A=$((8/WORLD_SIZE)) python train.py", False),
    ],
)
def test_options_of_a_launcher_do_not_count(home: Path, words: str, *, is_held: bool) -> None:
    package = home / "bin" / "torch" / "distributed"
    package.mkdir(parents=True)
    (package / "run.py").write_text("WORLD_SIZE")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(home / "bin"))
        assert needed(home, IN_CODE, words) == 4 * is_held


def test_modules_beside_the_script_are_read_too(home: Path) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "options.py").write_text(IN_CODE)
    source = "from mine.options import (\n    args,\n)"
    assert needed(home, source) == 4
    (home / "mine" / "options.py").write_text(f"from . import batch\n{IN_CODE}")
    (home / "mine" / "batch.py").write_text("steps = 8 // get_world_size()")
    assert needed(home, source) == 0


def test_a_module_is_found_where_python_finds_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = home / "env" / "lib" / "python3.11" / "site-packages" / "trl" / "scripts"
    package.mkdir(parents=True)
    (home / "env" / "bin").mkdir()
    (home / "env" / "bin" / "python").touch(mode=0o755)
    (package / "sft.py").write_text("from trl import SFTConfig, TrlParser")
    assert needed(home, words=f"{home}/env/bin/python -m trl.scripts.sft", steps=1) == 1
    assert needed(home, words="python -m train", source=IN_CODE) == 4
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}::")
    assert needed(home, words="python -m scripts.sft", steps=1) == 1


def test_a_configuration_may_set_it(home: Path) -> None:
    words = "llamafactory-cli train run.yaml"
    (home / "run.yaml").write_text("gradient_accumulation_steps: 4\nnum_train_epochs: 3.0\n")
    assert needed(home, words=words) == 4
    assert needed(home, words=words, steps=2) == 0, "it is from elsewhere"


@pytest.mark.parametrize(
    ("batch", "words", "is_held"),
    [
        ("sed s/N/$((8 / SLURM_NTASKS))/ a >b\nesrun python train.py b", "b", True),
        ("A=$((8 / SLURM_NTASKS)) esrun python train.py --size $A", "--size 8", False),
        ("A=$((8 / SLURM_NTASKS)) esrun python train.py --size $A", "--size=2", False),
        ("echo $SLURM_JOB_NODELIST; esrun python train.py --seed 1", "--seed 1", True),
    ],
)
def test_a_batch_script_may_compute_the_arguments(
    home: Path, batch: str, words: str, *, is_held: bool
) -> None:
    assert bool(needed(home, IN_CODE, f"python train.py {words}", batch=batch)) is is_held
    reads = f"{IN_CODE}\nbatch = os.environ['BATCH']"
    assert needed(home, reads, f"python train.py {words}", batch=batch) == 0


@pytest.mark.parametrize(
    ("steps", "max_steps"), [(4, 100), (4, None), (None, -1), (0, -1), (10**12, -1), ("4", -1)]
)
def test_steps_that_end_the_training_or_unknown_arguments_say_nothing(
    home: Path, steps: object, max_steps: object
) -> None:
    (home / "train.py").write_text(IN_CODE)
    check = FixedAccumulation(parse(["--checkpoint", "c", "python", "train.py"]))
    assert check.needed_micro_batches(str(save(home, steps, max_steps)), 1) == 0


def test_an_argument_file_that_cannot_be_read_says_nothing(home: Path) -> None:
    (home / "train.py").write_text(IN_CODE)
    folder = save(home)
    for content in (b"", b"PK\3\4", b"\x80\x02."):
        (folder / "training_args.bin").write_bytes(content)
        check = FixedAccumulation(parse(["--checkpoint", "c", "python", "train.py"]))
        assert check.needed_micro_batches(str(folder), 1) == 0


def test_the_log_says_what_to_do(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def line(source: str, steps: int) -> str:
        run = home / f"{len(source)}"
        run.mkdir()
        (home / "train.py").write_text(source)
        check = FixedAccumulation(parse(["--checkpoint", "c", "python", "train.py"]))
        job = ScriptJob(run, pattern="checkpoint-*", accumulation=check)
        save(run, steps)
        job.settle()
        report = job.settle()
        assert (report.rehearsal, report.needed_micro_batches) == ("accumulation", steps)
        return capfd.readouterr().err.rpartition(" (docs/")[0]

    end = ", or --micro-batches script, to have it resized all the same"
    variable = 'let the script set gradient_accumulation_steps=int(os.environ["{}"])'.format(
        "SLURM_ELASTIC_ACCUMULATION"
    )
    assert line(IN_CODE, 4) == (
        "esrun: checkpoint-60 is named by steps, and on each rank a step has 4 micro-batches"
        " (gradient_accumulation_steps): on another number of ranks the script would resume at a"
        " wrong epoch. So the job keeps its size; give esrun --micro-batches 4, and"
        f" {variable}{end}"
    )
    assert line("TrainingArguments('out')", 1).endswith(
        f"give esrun --micro-batches N, the script an Nth of its batch size, and {variable}{end}"
    )
    assert line(PARSED, 1).endswith(
        "; give the script --gradient_accumulation_steps N with an Nth of its batch size, and"
        f" esrun --micro-batches N{end}"
    )


def test_a_script_that_takes_the_variable_is_not_started_where_it_is_not_exact(home: Path) -> None:
    def line(source: str, world: int, max_steps: int = -1, words: str = "--micro-batches 4") -> str:
        (home / "train.py").write_text(source)
        options = parse(["--checkpoint", "c", *words.split(), "python", "train.py"])
        path = str(save(home, max_steps=max_steps))
        return FixedAccumulation(options).wrong_size_line(path, 1, world)

    takes = "steps = int(os.environ['SLURM_ELASTIC_ACCUMULATION'])"
    assert line(takes, 3).startswith("--micro-batches 4: a step has 4 of them on 1 rank and 3 on 3")
    assert [line(takes, world) for world in (1, 2, 4)] == [""] * 3
    assert not line(takes, 3, max_steps=100)
    assert not line(takes, 3, words="")
    assert not line(f"{takes}\nassert os.environ['SLURM_ELASTIC_ACCUMULATION_EXACT']", 3)
    assert not line("steps = 8 // world_size", 3)
