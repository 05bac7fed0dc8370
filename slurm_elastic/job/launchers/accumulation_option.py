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

from collections.abc import Iterator, Sequence

from slurm_elastic.job.environment.world_variables import accumulation

#: A longer number is none of micro-batches.
_MAX_DIGITS = 9
_OPTIONS = ("--gradient_accumulation_steps", "--gradient-accumulation-steps")


class AccumulationWord:
    """Number of micro-batches in a program's arguments.

    Attributes:
        value: the number.
        is_replaced: whether `--micro-batches` replaces it.
    """

    __slots__ = ("is_replaced", "value")

    def __init__(self, value: int, *, is_replaced: bool) -> None:
        self.value, self.is_replaced = value, is_replaced


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
    for name, value in _pairs(program):
        if int(value) * world > 1:
            return (
                f"{name} {value} is the same on any number of ranks, so the global batch is not; to"
                f" keep it, give esrun --micro-batches {int(value) * world}"
                " (docs/esrun-global-batch.md)"
            )
    return ""


def own_accumulation(program: Sequence[str], micro_batches: int | None) -> str:
    """Return a line for the log if a script of accelerate accumulates without it; else "".

    Then the variable by which accelerate accumulates must not be set: it would scale the loss.

    Args:
        program: with its arguments.
        micro_batches: of `esrun --micro-batches`; None: not given, so the variable is not set.
    """
    if micro_batches is None:
        return ""
    # Slow to load, rarely needed.
    from slurm_elastic.job.launchers.script_sources import (  # noqa: PLC0415
        accumulates_itself,
        script_sources,
    )

    for path, source in script_sources(program):
        if accumulates_itself(source):
            remedy = (
                ""
                if any(True for _ in _pairs(program))
                else "; it has to accumulate SLURM_ELASTIC_ACCUMULATION micro-batches for each step"
            )
            return (
                f"{path} does not use accelerator.accumulate, so accelerate does not count its"
                " micro-batches: ACCELERATE_GRADIENT_ACCUMULATION_STEPS, which"
                f" would only scale its loss, is not set{remedy}"
            )
    return ""


def _line_of_command(command: str, steps: str, reason: str) -> str:
    """Return a line for the log if a command for `bash -c` has another number; else ""."""
    for name, value in _pairs(command.split()):
        if value != steps:
            return (
                f"{name} {value} within a quoted command stays, though {reason} make {steps} on"
                f" each; write $SLURM_ELASTIC_ACCUMULATION in place of {value}"
            )
    return ""


def accumulation_words(program: Sequence[str]) -> list[AccumulationWord]:
    """Return the numbers of micro-batches in a program's arguments, in their order.

    >>> words = accumulation_words(["a", "--gradient_accumulation_steps", "4"])
    >>> [(word.value, word.is_replaced) for word in words]
    [(4, True)]
    """
    found = [AccumulationWord(int(value), is_replaced=True) for _, value in _pairs(program)]
    for word in program:
        parts = word.split()
        values = [value for _, value in _pairs(parts)]
        for part in parts:
            name, _, value = part.partition("=")
            if name in _OPTIONS and _is_count(value):
                values.append(value)
        found += [AccumulationWord(int(value), is_replaced=False) for value in values]
    return found


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option that is followed by a number, with that."""
    for name, value in zip(words, words[1:]):  # noqa: B905, RUF007 - nothing to import
        if name in _OPTIONS and _is_count(value):
            yield name, value


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS
