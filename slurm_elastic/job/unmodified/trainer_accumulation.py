"""Accumulation of transformers' Trainer where no option of the command line gives it.

The Trainer saves its arguments beside each checkpoint. They show how many micro-batches a step has
on each rank, but not where that number is from. It is the same on any number of ranks if the files
of the script set it, or leave the default, and read no number of ranks or GPUs. A script whose
files cannot be found is not judged.

Nothing is unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from slurm_elastic.job.environment.regular_file import read_text
from slurm_elastic.job.launchers.local_imports import local_imports
from slurm_elastic.job.unmodified.saved_numbers import read_object
from slurm_elastic.job.unmodified.size_words import size_word

_ARGUMENTS = "training_args.bin"
_STEPS, _MAX_STEPS = "gradient_accumulation_steps", "max_steps"
#: A larger number is none of micro-batches.
_MOST_STEPS = 10**9
#: Words by which a script makes the arguments of a Trainer; also of trl.
_USES_TRAINER = re.compile(
    r"TrainingArguments\b|\bTrlParser\b|\b(?:SFT|DPO|GRPO|KTO|ORPO|CPO|RLOO|PRM|Reward)Config\b"
)
#: Words of a script that gets the number of ranks or GPUs, or gives a batch over all ranks. Not
#: `n_gpu`, which the examples of transformers only log.
_SIZE = re.compile(
    r"world_?size|device_count|num_processes|nprocs?(?![a-z])|SLURM_|visible_devices|nvidia-smi"
    r"|num_(?:gpu|device|rank|node)s?\b|n_?(?:gpu|device|rank|node)s\b"
    r"|split_batches|parallelism_config",
    re.IGNORECASE,
)
#: Not within an example of a command line.
_SET_IN_CODE = re.compile(rf"(?<!--){_STEPS}")
#: Lines about the evaluation say nothing of the training.
_EVALUATION = re.compile(r"^.*eval_batch_size.*$", re.MULTILINE)
_PARSES_OPTIONS = re.compile(r"\b(?:HfArgumentParser|TrlParser)\b")
_CONFIGURATION = (".yaml", ".yml", ".json")
_READS_VARIABLES = re.compile(r"environ|getenv|oc\.env")
_MAX_BYTES = 1 << 20


class TrainerAccumulation(NamedTuple):
    """Accumulation of a Trainer that is the same on any number of ranks.

    Attributes:
        steps: micro-batches of each rank in a step; 0: it may change with the number of ranks, or
            nothing depends on it.
        is_option: whether the script takes it as an option, which was not given.
    """

    steps: int
    is_option: bool = False


def trainer_accumulation(
    checkpoint: str,
    program: Sequence[str],
    sources: Sequence[tuple[str, str]],
    read_scripts: Callable[[], Sequence[str]],
) -> TrainerAccumulation:
    """Return the accumulation of a script that has written a checkpoint with the Trainer.

    Args:
        checkpoint: directory.
        program: with its arguments.
        sources: path and text of the Python files that it names.
        read_scripts: returns the texts of the batch script and of those that it calls.
    """
    arguments = read_object(f"{checkpoint}/{_ARGUMENTS}")
    steps = arguments.get(_STEPS)
    if type(steps) is not int or not 0 < steps <= _MOST_STEPS or not _counts_epochs(arguments):
        return TrainerAccumulation(0)
    texts = [*(text for _, text in sources), *local_imports(sources)]
    configurations = _configurations(program)
    is_written = re.compile(rf"{_STEPS}\W{{1,4}}{steps}(?!\w)")
    is_known = any(map(_USES_TRAINER.search, texts)) or (
        not texts and any(map(is_written.search, configurations))
    )
    texts += configurations
    if (
        not is_known
        or any(_SIZE.search(_EVALUATION.sub("", text)) for text in texts)
        or _SIZE.search(" ".join(_without_launcher_options(program)))
        or _may_be_computed(program, texts, read_scripts())
    ):
        return TrainerAccumulation(0)
    is_set = any(map(_SET_IN_CODE.search, texts))
    is_option = any(map(_PARSES_OPTIONS.search, texts)) and not is_set
    return TrainerAccumulation(steps, is_option)


def counts_epochs(checkpoint: str) -> bool:
    """Return whether the training ends after a number of epochs, not of `max_steps`.

    Args:
        checkpoint: directory that the Trainer has written.
    """
    return _counts_epochs(read_object(f"{checkpoint}/{_ARGUMENTS}"))


def _counts_epochs(arguments: Mapping[Any, Any]) -> bool:
    most = arguments.get(_MAX_STEPS)
    return type(most) is int and most <= 0


def _without_launcher_options(program: Sequence[str]) -> Iterator[str]:
    """Yield the words of a program without options before its script: they are of a launcher.

    >>> list(_without_launcher_options(["torchrun", "--nproc_per_node=gpu", "a.py", "--seed", "1"]))
    ['torchrun', 'a.py', '--seed', '1']
    """
    words = " ".join(program).split()
    scripts = [at for at, word in enumerate(words) if word.endswith(".py")]
    first = scripts[0] if scripts else words.index("-m") if "-m" in words else 0
    for at, word in enumerate(words):
        if at >= first or not word.startswith("-"):
            yield word


def _may_be_computed(program: Sequence[str], texts: Sequence[str], scripts: Sequence[str]) -> bool:
    """Return whether the batch script may have computed something from the number of GPUs."""
    if not any(map(size_word, scripts)):
        return False
    if any(map(_READS_VARIABLES.search, texts)):
        return True
    return any(
        not any(re.search(rf"{written}(?!\w)", script) for script in scripts)
        for written in _written_numbers(program)
    )


def _written_numbers(program: Sequence[str]) -> Iterator[str]:
    """Yield, as regular expressions, each number among the arguments with its option before it."""
    for previous, word in pairwise(program):
        name, equals, value = word.rpartition("=")
        if value.isdecimal():
            before = re.escape(name) + "=" if equals else re.escape(previous) + r"\s+"
            yield rf"{before}[\"']?{value}"


def _configurations(program: Sequence[str]) -> list[str]:
    """Return the texts of the files of options that a program's arguments name."""
    paths = [word.rpartition("=")[2] for word in program]
    texts = [read_text(path, _MAX_BYTES) for path in paths if path.endswith(_CONFIGURATION)]
    return [text for text in texts if text is not None]
