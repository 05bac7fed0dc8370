"""The option by which scripts of transformers and accelerate get the micro-batches of a step.

Such scripts compute the length of their schedule, and the place in the data at which they resume,
from this option. So it has to fit the number of ranks, as does the variable by which accelerate
accumulates.

Part of each start: imports only modules that Python has loaded already.

>>> with_accumulation(["python", "train.py", "--gradient_accumulation_steps", "8"], 8, 2)
(['python', 'train.py', '--gradient_accumulation_steps', '4'], \
'--gradient_accumulation_steps 8 is replaced by 4: --micro-batches 8 on 2 ranks')
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.job.environment.world_variables import accumulation

#: A longer number is none of micro-batches.
_MAX_DIGITS = 9
_OPTIONS = ("--gradient_accumulation_steps", "--gradient-accumulation-steps")


def with_accumulation(
    program: Sequence[str], micro_batches: int | None, world: int
) -> tuple[list[str], str]:
    """Return a program's arguments for a number of ranks, and a line for the job's log or "".

    An option with `=` stays: scripts such as nanoGPT, which accept no other form, divide its value
    by the ranks themselves.

    Args:
        program: with its arguments, as the user has given them.
        micro_batches: of one step of the optimizer over all ranks; None: not given.
        world: number of ranks.
    """
    words = list(program)
    if micro_batches is None:
        return words, ""
    steps = str(accumulation(micro_batches, world)[0])
    reason = f"--micro-batches {micro_batches} on {world} rank{'' if world == 1 else 's'}"
    line = ""
    for at, word in enumerate(program):
        name, equals, value = word.partition("=")
        if name not in _OPTIONS:
            line = _line_of_command(word, steps, reason) or line
            continue
        if not equals:
            value = program[at + 1] if at + 1 < len(program) else ""
        if not _is_count(value) or value == steps:
            continue
        if equals:
            line = (
                f"{word} stays, though {reason} make {steps} on each; if the script does not divide"
                f" it by the ranks, write '{name} {value}', which esrun replaces"
            )
        else:
            words[at + 1] = steps
            line = f"{name} {value} is replaced by {steps}: {reason}"
    return words, line


def advice(program: Sequence[str], world: int, directive: str) -> str:
    """Return a line for the log if `--micro-batches` would keep the batch of a program; else "".

    Args:
        program: with its arguments, which is started without that option of esrun.
        world: number of ranks.
        directive: of the job; "" for a rigid one.
    """
    least, _, most = directive.partition(",")[0].partition("-")
    if not most or least == most:
        return ""
    for name, value in zip(program, program[1:]):  # noqa: B905, RUF007 - see above
        if name in _OPTIONS and _is_count(value) and int(value) * world > 1:
            return (
                f"{name} {value} is the same on any number of ranks, so the global batch is not; to"
                f" keep it, give esrun --micro-batches {int(value) * world}"
                " (docs/esrun-global-batch.md)"
            )
    return ""


def _line_of_command(command: str, steps: str, reason: str) -> str:
    """Return a line for the log if a command for `bash -c` has another number; else ""."""
    words = command.split()
    for name, value in zip(words, words[1:]):  # noqa: B905, RUF007 - see above
        if name in _OPTIONS and _is_count(value) and value != steps:
            return (
                f"{name} {value} within a quoted command stays, though {reason} make {steps} on"
                f" each; write $SLURM_ELASTIC_ACCUMULATION in place of {value}"
            )
    return ""


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
