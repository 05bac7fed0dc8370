"""A script that would resume at a wrong epoch on another number of ranks keeps its size."""

from pathlib import Path

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.job.esrun_options import parse
from slurm_elastic.job.unmodified.fixed_accumulation import FixedAccumulation
from tests.support.job.script_job import ScriptJob

ACCELERATE, TRAINER = "random_states_0.pkl", "trainer_state.json"
OPTION = "--gradient_accumulation_steps"
#: How such scripts compute the epoch at which they resume.
NO_TRAINER = "starting_epoch = resume_step // len(train_dataloader)"


def checkpoint(home: Path, name: str = "step_60", file: str = ACCELERATE) -> str:
    (home / name).mkdir(exist_ok=True)
    (home / name / file).touch()
    return str(home / name)


def needed(home: Path, *words: str, world: int = 1, batch_script: str = "", **kind: str) -> int:
    options = parse(["--checkpoint", "step_*", *words])
    check = FixedAccumulation(options, lambda: [batch_script] if batch_script else [])
    return check.needed_micro_batches(checkpoint(home, **kind), world)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "run_clm_no_trainer.py"
    path.write_text(NO_TRAINER)
    return str(path)


def test_a_script_of_transformers_without_the_trainer_keeps_its_size(
    tmp_path: Path, script: str
) -> None:
    program = ("python", script, OPTION, "4")
    assert needed(tmp_path, *program) == 4
    assert needed(tmp_path, *program, world=2) == 8
    assert needed(tmp_path, "--micro-batches", "4", *program) == 0
    assert needed(tmp_path, "--micro-batches", "script", *program) == 0


@pytest.mark.parametrize("name", ["step_60", "checkpoint-60"])
def test_a_script_with_accumulation_by_default_keeps_its_size(
    tmp_path: Path, script: str, name: str
) -> None:
    assert needed(tmp_path, "accelerate", "launch", script, name=name) == 1
    assert needed(tmp_path, "bash", "-c", f"exec python {script} --seed 1", world=2) == 2
    assert needed(tmp_path, "python", "-m", "other", name=name) == 0


def test_the_trainer_with_an_accumulation_of_its_own_keeps_its_size(tmp_path: Path) -> None:
    kind = {"name": "checkpoint-60", "file": TRAINER}
    assert needed(tmp_path, "python", "run_clm.py", OPTION, "4", **kind) == 4
    assert needed(tmp_path, "--micro-batches", "4", "python", "a.py", OPTION, "4", **kind) == 0
    assert needed(tmp_path, "python", "run_clm.py", **kind) == 0, "it may set it by itself"


@pytest.mark.parametrize("word", [f"{OPTION}=4", f"exec python a.py {OPTION} 4"])
def test_an_option_that_esrun_does_not_replace_is_no_remedy(tmp_path: Path, word: str) -> None:
    program = ("bash", "-c", word)
    assert needed(tmp_path, *program) == 4
    assert needed(tmp_path, "--micro-batches", "4", *program) == 4


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        ("first_epoch = global_step // num_update_steps_per_epoch", True),
        ("first_epoch = self.global_step//len( loader ) // accumulation", True),
        ("epochs = args.max_steps // num_update_steps_per_epoch + 1", False),
        ("epochs = config.train_steps // len(train_dataloader)", False),
        ("epoch = step // 100", False),
    ],
)
def test_only_an_epoch_that_is_computed_from_the_steps_done_counts(
    tmp_path: Path, script: str, text: str, is_held: bool
) -> None:
    Path(script).write_text(text)
    assert needed(tmp_path, "python", script) == is_held


@pytest.mark.parametrize(
    ("text", "is_held"),
    [
        (f"{NO_TRAINER}\nparser.add_argument('{OPTION}')", True),  # it computes with 1
        (f"{NO_TRAINER}\naccelerator.backward(loss)", True),  # accelerate does not accumulate
        (f"{NO_TRAINER}\nwith accelerator.accumulate(model):", False),
    ],
)
def test_micro_batches_alone_are_a_remedy_only_where_accelerate_accumulates(
    tmp_path: Path, script: str, text: str, is_held: bool
) -> None:
    Path(script).write_text(text)
    assert needed(tmp_path, "--micro-batches", "4", "python", script) == is_held


@pytest.mark.parametrize(
    "program",
    [
        ("bash", "-c", f"exec python a.py {OPTION} $SLURM_ELASTIC_ACCUMULATION"),
        ("python", "own.py", OPTION, "4"),
    ],
)
def test_a_script_that_knows_esrun_is_resized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(f"from slurm_elastic.integrations import accelerate\n{NO_TRAINER}")
    assert needed(tmp_path, *program) == 0


def test_a_batch_script_that_computes_the_accumulation_is_resized(
    tmp_path: Path, script: str
) -> None:
    program = ("python", script, OPTION, "4")
    computed = f"esrun python a.py {OPTION} $((4 / SLURM_GPUS_ON_NODE))"
    assert needed(tmp_path, *program, batch_script=computed) == 0
    mentioned = f"echo $SLURM_JOB_NODELIST\nesrun python a.py {OPTION} 4"
    assert needed(tmp_path, *program, batch_script=mentioned) == 4
    assert needed(tmp_path, *program, batch_script=f"N=4\nesrun python a.py {OPTION} $N") == 4


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("ckpt", ACCELERATE),
        ("epoch_3", ACCELERATE),  # the epoch is that in the name
        ("step_60", "model.pt"),
        ("global_step60", "mp_rank_00_model_states.pt"),
    ],
)
def test_other_checkpoints_say_nothing(tmp_path: Path, script: str, name: str, file: str) -> None:
    assert needed(tmp_path, "python", script, OPTION, "4", name=name, file=file) == 0


@pytest.mark.parametrize("name", ["missing.py", "loop.py", "a\0b.py", "d.py"])
def test_files_that_are_no_scripts_are_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    (tmp_path / "d.py").mkdir()
    assert needed(tmp_path, "python", f"{tmp_path}/{name}") == 0


def attempt(home: Path, words: str, *, run: int = 0, world: int = 1) -> ScriptJob:
    check = FixedAccumulation(parse(["--checkpoint", "step_*", *words.split()]))
    return ScriptJob(home, run=run, pattern="step_*", world=world, accumulation=check)


def save(job: ScriptJob, step: int, world: int = 1) -> Report:
    (job.home / f"step_{step}").mkdir()
    for name in ("model.txt", *(f"random_states_{rank}.pkl" for rank in range(world))):
        job.write(f"step_{step}/{name}")
    job.settle()
    return job.settle()


def test_it_is_not_resized_over_all_attempts_until_the_option_is_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"python train.py {OPTION} 4"
    report = save(attempt(tmp_path, program), 60)
    assert (report.rehearsal, report.needed_micro_batches) == ("accumulation", 4)
    for run in (1, 2):  # requeued by others
        job = attempt(tmp_path, program, run=run)
        (tmp_path / f"step_{60 * run}" / "model.txt").read_bytes()
        assert not job.state.report().proven
        report = save(job, 60 + 60 * run)
        assert (report.proven, report.rehearsal) == (False, "accumulation")
    lines = [line for line in capfd.readouterr().err.splitlines() if "wrong epoch" in line]
    line = (
        "esrun: step_60 is named by steps, and on each rank a step has 4 micro-batches"
        f" ({OPTION}): on another number of ranks the script would resume at a wrong epoch. So the"
        " job keeps its size; give esrun --micro-batches 4, and the script's option as two words"
        " outside quotes, or --micro-batches script, to have it resized all the same"
        " (docs/esrun-global-batch.md)"
    )
    assert lines == [line]
    job = attempt(tmp_path, f"--micro-batches script {program}", run=3)
    assert job.state.report().proven


def test_a_program_that_reports_its_steps_keeps_its_batch_itself(tmp_path: Path) -> None:
    job = attempt(tmp_path, f"python train.py {OPTION} 4")
    job.watch.record_program_step({"checkpoint_step": 60})
    assert save(job, 60).rehearsal == "able"


def test_it_is_not_started_on_ranks_that_cannot_share_the_batch(tmp_path: Path) -> None:
    words = f"--micro-batches 4 python train.py {OPTION} 4"
    assert save(attempt(tmp_path, words, world=2), 60, world=2).rehearsal == "able"
    for world in (1, 2, 4):
        assert not attempt(tmp_path, words, run=1, world=world).watch.wrong_size_line
    assert attempt(tmp_path, words, run=1, world=3).watch.wrong_size_line == (
        "--micro-batches 4: a step has 4 of them on 2 ranks and 3 on 3 ranks, so from step_60 the"
        " script would resume at a wrong epoch. It is not started on this size, and the job goes"
        " back; allow only sizes that divide 4: --elastic=…,sizes=1:2:4"
    )
    other = f"--micro-batches 4 python train.py {OPTION} $SLURM_ELASTIC_ACCUMULATION"
    assert not attempt(tmp_path, other, run=1, world=3).watch.wrong_size_line


def test_a_job_that_was_begun_on_such_ranks_goes_on_there(tmp_path: Path) -> None:
    words = f"--micro-batches 4 python train.py {OPTION} 4"
    save(attempt(tmp_path, words, world=3), 60, world=3)
    assert not attempt(tmp_path, words, run=1, world=3).watch.wrong_size_line
    assert attempt(tmp_path, words, run=1, world=4).watch.wrong_size_line
