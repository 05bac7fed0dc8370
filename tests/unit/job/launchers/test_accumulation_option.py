"""The accumulation of a program's arguments follows the number of ranks."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.job.launchers import accumulation_option
from slurm_elastic.job.launchers.accumulation_option import advice, with_accumulation

OPTION = "--gradient_accumulation_steps"


def test_examples() -> None:
    assert doctest.testmod(accumulation_option).failed == 0


@pytest.mark.parametrize("option", [OPTION, "--gradient-accumulation-steps"])
@pytest.mark.parametrize(("world", "steps"), [(1, "8"), (2, "4"), (8, "1"), (16, "1")])
def test_the_batch_is_kept_on_any_number_of_ranks(option: str, world: int, steps: str) -> None:
    program = ["accelerate", "launch", "train.py", option, "8", "--seed", "8"]
    words, line = with_accumulation(program, 8, world)
    assert words == ["accelerate", "launch", "train.py", option, steps, "--seed", "8"]
    assert bool(line) == (steps != "8")


def test_a_value_that_may_be_of_all_ranks_stays_and_the_log_says_so() -> None:
    program = ["python", "train.py", f"{OPTION}=8"]
    words, line = with_accumulation(program, 8, 2)
    assert words == program
    assert line == (
        f"{OPTION}=8 stays, though --micro-batches 8 on 2 ranks make 4 on each; if the script does"
        f" not divide it by the ranks, write '{OPTION} 8', which esrun replaces"
    )


def test_a_number_in_a_command_of_a_shell_stays_and_the_log_says_so() -> None:
    program = ["bash", "-c", f"exec python train.py {OPTION} 8 --seed 8"]
    assert with_accumulation(program, 8, 1) == (program, "")
    words, line = with_accumulation(program, 8, 2)
    assert words == program
    assert line == (
        f"{OPTION} 8 within a quoted command stays, though --micro-batches 8 on 2 ranks make 4 on"
        " each; write $SLURM_ELASTIC_ACCUMULATION in place of 8"
    )
    right = ["bash", "-c", f"exec python train.py {OPTION} $SLURM_ELASTIC_ACCUMULATION"]
    assert with_accumulation(right, 8, 2) == (right, "")


@pytest.mark.parametrize(
    "program", [["a", OPTION], ["a", OPTION, "$N"], ["a", OPTION, "auto"], [f"{OPTION}="]]
)
def test_what_is_no_number_stays(program: list[str]) -> None:
    assert with_accumulation(program, 8, 2) == (program, "")


@pytest.mark.parametrize(
    ("value", "world", "directive", "micro_batches"),
    [
        ("4", 1, "1-4", 4),
        ("4", 2, "1-4,types=a100", 8),
        ("1", 2, "1-4", 2),
        ("1", 1, "1-4", None),  # one batch cannot be shared
        ("4", 1, "1-1", None),
        ("4", 1, "", None),
        ("auto", 1, "1-4", None),
        ("9" * 5000, 1, "1-4", None),
    ],
)
def test_micro_batches_are_recommended_before_a_batch_changes(
    value: str, world: int, directive: str, micro_batches: int | None
) -> None:
    line = advice(["python", "train.py", OPTION, value], world, directive)
    assert line == (
        f"{OPTION} {value} is the same on any number of ranks, so the global batch is not; to keep"
        f" it, give esrun --micro-batches {micro_batches} (docs/esrun-global-batch.md)"
        if micro_batches
        else ""
    )


@given(
    program=st.lists(st.sampled_from([OPTION, "4", "8", "x", f"{OPTION}=4"])),
    micro_batches=st.none() | st.integers(1, 64),
    world=st.integers(1, 64),
)
def test_nothing_else_changes(program: list[str], micro_batches: int | None, world: int) -> None:
    words, line = with_accumulation(program, micro_batches, world)
    assert len(words) == len(program)
    changed = [at for at, word in enumerate(words) if word != program[at]]
    assert all(program[at - 1] == OPTION and at for at in changed)
    assert line or not changed
    assert micro_batches or not changed
