"""Variables that keep the global batch over changes of the world."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.job.environment.world_variables import (
    accumulation,
    batch_may_change,
    fixed_batch,
    inexact_line,
    read_start_world,
    world_variables,
)
from slurm_elastic.job.esrun_options import UsageError, parse


@given(st.integers(1, 5000), st.integers(1, 600))
def test_no_accumulation_is_nearer(micro_batches: int, world: int) -> None:
    steps, exact = accumulation(micro_batches, world)
    error = abs(steps * world - micro_batches)
    assert steps >= 1
    assert exact == (error == 0)
    others = (abs(other * world - micro_batches) for other in (max(1, steps - 1), steps + 1))
    assert all(error <= other for other in others)


def test_the_start_world_decides_without_an_option() -> None:
    variables = world_variables({}, world=2, start_world=8)
    assert variables == {
        "SLURM_ELASTIC_WORLD_SIZE": "2",
        "SLURM_ELASTIC_START_WORLD_SIZE": "8",
        "SLURM_ELASTIC_ACCUMULATION": "4",
        "SLURM_ELASTIC_ACCUMULATION_EXACT": "1",
    }


def test_more_ranks_than_micro_batches_are_not_exact() -> None:
    variables = world_variables({}, world=4, start_world=1)
    assert variables["SLURM_ELASTIC_ACCUMULATION"] == "1"
    assert variables["SLURM_ELASTIC_ACCUMULATION_EXACT"] == "0"


def test_accelerate_is_changed_only_when_asked_for() -> None:
    variables = world_variables({}, world=2, start_world=1, micro_batches=8)
    assert variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "4"
    assert variables["SLURM_ELASTIC_MICRO_BATCHES"] == "8"
    assert variables["SLURM_ELASTIC_START_WORLD_SIZE"] == "1"


def test_an_uneven_share_is_said() -> None:
    assert inexact_line(8, 4) == ""
    line = inexact_line(8, 3)
    assert "3 ranks cannot share them evenly; 3 on each make 9, a global batch of 112%" in line


@pytest.mark.parametrize(
    ("directive", "batch"),
    [
        ("1-8,batch=256", 256),
        ("1-8, batch=256-256,freeze=auto", 256),
        ("1-8,batch=256-1024", None),
        ("1-8", None),
        ("", None),
        ("1-8,batch=x", None),
        ("1-8,batch=0", None),
        (f"1-8,batch={'9' * 5000}", None),
    ],
)
def test_the_batch_of_the_directive(directive: str, batch: int | None) -> None:
    assert fixed_batch(directive) == batch
    assert batch_may_change({"SLURM_SPANK_ELASTIC": directive}) == (directive[-4:] == "1024")
    variables = world_variables({"SLURM_SPANK_ELASTIC": directive}, world=1)
    assert variables.get("SLURM_ELASTIC_GLOBAL_BATCH") == (str(batch) if batch else None)


@pytest.mark.parametrize(
    ("text", "world"),
    [
        ('{"count": 3, "start_world": 4, "jump": ""}', 4),
        ('{"start_world": 12}', 12),
        ('{"start_world": 0}', None),
        ('{"count": 3}', None),
        ('{"start_world": -2}', None),
        ('{"start_world": "4"}', None),
        ("\x00\xff", None),
        ("", None),
    ],
)
def test_the_start_world_of_earlier_attempts(tmp_path: Path, text: str, world: int | None) -> None:
    env = {"SLURM_SUBMIT_DIR": str(tmp_path)}
    assert read_start_world(env, "c-7") is None
    (tmp_path / ".slurm-elastic").mkdir()
    (tmp_path / ".slurm-elastic" / "c-7.json").write_text(text)
    assert read_start_world(env, "c-7") == world


def test_the_option() -> None:
    assert parse(["--micro-batches", "8", "prog"]).micro_batches == 8
    for value in ("0", "-1", "x", "9" * 5000, "1000001", "²"):
        with pytest.raises(UsageError, match="expected a number from 1 to 1000000"):
            parse([f"--micro-batches={value}", "prog"])
