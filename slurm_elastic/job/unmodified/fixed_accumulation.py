"""Scripts that resume at a wrong epoch on another number of ranks, unless esrun adapts an option.

Such a script names its checkpoints by steps of the optimizer, and when it resumes computes the
epoch as steps · accumulation // batches of an epoch. On twice the ranks an epoch has half the
batches, so the script leaves out as many epochs as it has trained. `esrun --micro-batches` adapts
the accumulation; without it the job has to keep its size.

Recognised are checkpoints of accelerate, and of the Trainer of transformers, also where its
accumulation is no option of the command line (`trainer_accumulation`). A script that knows esrun's
variables, and a batch script that computes the accumulation, keep the batch themselves.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from slurm_elastic.job.environment.world_variables import accumulation
from slurm_elastic.job.esrun_options import Options
from slurm_elastic.job.launchers.accumulation_option import accumulation_words
from slurm_elastic.job.launchers.local_imports import local_imports
from slurm_elastic.job.launchers.script_sources import accumulates_itself, script_sources
from slurm_elastic.job.unmodified.size_words import called_scripts, read_batch_script, size_word
from slurm_elastic.job.unmodified.trainer_accumulation import counts_epochs, trainer_accumulation
from slurm_elastic.job.unmodified.training_state_check import STEP_NAME

#: Files that accelerate and the Trainer write into each checkpoint.
_ACCELERATE, _TRAINER = "random_states_0.pkl", "trainer_state.json"
#: In a script: an epoch is computed from the steps that are done; not the number of all epochs.
_DIVISION = re.compile(
    r"(?<!\w)(?!max|total|num|train)\w*steps?\s*//"
    r"\s*(?:len\(\s*\w*(?:loader|_dl)\w*\s*\)|num_update_steps_per_epoch\b)"
)
#: Larger sizes are not named.
_MOST_SIZES = 257
_OPTION = "--gradient_accumulation_steps"
#: Variables of esrun; a script that knows the second one decides itself.
_VARIABLE, _EXACT = "SLURM_ELASTIC_ACCUMULATION", "SLURM_ELASTIC_ACCUMULATION_EXACT"
_OWN_NAME = re.compile(r"slurm_elastic", re.IGNORECASE)


class FixedAccumulation:
    """Check of one program in one run of its job.

    Args:
        options: of esrun.
        read_scripts: returns the texts of the batch script and of those that it calls.

    Attributes:
        is_set_in_code: whether the script itself sets its accumulation.
    """

    def __init__(self, options: Options, read_scripts: Callable[[], Sequence[str]] = tuple) -> None:
        self._options = options
        self._read_scripts = read_scripts
        self._steps: dict[bool, int] = {}
        self.is_set_in_code = False

    def needed_micro_batches(self, checkpoint: str, world: int) -> int:
        """Return the `--micro-batches` without which the script resumes wrongly; 0: none are.

        Args:
            checkpoint: path of a complete one.
            world: number of ranks that wrote it.
        """
        if not _is_named_by_steps(checkpoint):
            return 0
        is_accelerate = _has(checkpoint, _ACCELERATE)
        if is_accelerate not in self._steps:
            self._steps[is_accelerate] = self._fixed_steps(checkpoint, is_accelerate=is_accelerate)
        return self._steps[is_accelerate] * world

    def wrong_size_line(self, checkpoint: str, old_world: int, world: int) -> str:
        """Return why the program must not resume on a number of ranks; "": it may.

        Args:
            checkpoint: path of the newest one.
            old_world: number of ranks that wrote it.
            world: number of ranks that would resume from it.
        """
        micro_batches = self._options.micro_batches
        if micro_batches is None or not _is_named_by_steps(checkpoint):
            return ""
        old_batch, batch = (accumulation(micro_batches, n)[0] * n for n in (old_world, world))
        if old_batch == batch or not self._adapts(checkpoint):
            return ""
        sizes = ":".join(str(n) for n in range(1, _MOST_SIZES) if micro_batches % n == 0)
        name = Path(checkpoint).name
        return (
            f"--micro-batches {micro_batches}: a step has {old_batch} of them on"
            f" {_ranks(old_world)} and {batch} on {_ranks(world)}, so from {name} the script would"
            " resume at a wrong epoch. It is not started on this size, and the job goes back; allow"
            f" only sizes that divide {micro_batches}: --elastic=…,sizes={sizes}"
        )

    def _adapts(self, checkpoint: str) -> bool:
        """Return whether the script takes the accumulation for the present ranks from esrun."""
        words = accumulation_words(self._options.program)
        if words:
            return all(word.is_replaced for word in words)
        if _has(checkpoint, _ACCELERATE) or not counts_epochs(checkpoint):
            return False
        files = list(script_sources(self._options.program))
        texts = [*(text for _, text in files), *local_imports(files)]
        return any(_VARIABLE in text for text in texts) and not any(_EXACT in t for t in texts)

    def _fixed_steps(self, checkpoint: str, *, is_accelerate: bool) -> int:
        """Return the accumulation that is the same on any number of ranks; 0: none is known."""
        options, program = self._options, self._options.program
        words = accumulation_words(program)
        is_given = options.micro_batches is not None
        is_adapted = is_given and bool(words) and all(word.is_replaced for word in words)
        if is_adapted or options.keeps_batch:
            return 0
        files = list(script_sources(program))
        sources = [text for _, text in files]
        if any(_OWN_NAME.search(text) for text in (*program, *sources, *local_imports(files))):
            return 0
        if words:
            return 0 if self._is_computed(words[-1].value) else words[-1].value
        if not is_accelerate:
            fixed = trainer_accumulation(checkpoint, program, files, self._read_scripts)
            self.is_set_in_code = not fixed.is_option
            return fixed.steps
        divides = any(
            _DIVISION.search(text) and (not is_given or _OPTION in text or accumulates_itself(text))
            for text in sources
        )
        return int(divides)  # 1 by default

    def _is_computed(self, value: int) -> bool:
        """Return whether the batch script may have computed the option from the number of GPUs."""
        scripts = self._read_scripts()
        written = re.compile(rf"--gradient[_-]accumulation[_-]steps[= ]+[\"']?{value}(?!\w)")
        return not any(map(written.search, scripts)) and any(map(size_word, scripts))


def _ranks(world: int) -> str:
    return f"{world} rank{'' if world == 1 else 's'}"


def _is_named_by_steps(checkpoint: str) -> bool:
    """Return whether it is a checkpoint of accelerate or the Trainer with steps in its name."""
    if not STEP_NAME.search(Path(checkpoint).name.lower()):
        return False
    return _has(checkpoint, _ACCELERATE) or _has(checkpoint, _TRAINER)


def _has(checkpoint: str, name: str) -> bool:
    return os.path.exists(f"{checkpoint}/{name}")  # noqa: PTH110 - a path may be invalid


def batch_scripts(job_id: int) -> list[str]:
    """Return the texts of a job's batch script, and of scripts that it calls; [] if unreadable."""
    text = read_batch_script(job_id)
    if text is None:
        return []
    return [text, *(script.text for script in called_scripts(text, os.getpid()))]


def fixed_line(checkpoint: str, needed: int, world: int, *, is_set_in_code: bool = False) -> str:
    """Return why a job keeps its size.

    Args:
        checkpoint: path of one of its checkpoints.
        needed: as returned by `FixedAccumulation.needed_micro_batches`.
        world: number of ranks.
        is_set_in_code: whether the script itself sets its accumulation.
    """
    if is_set_in_code:
        number = f"{needed}," if needed > 1 else "N, the script an Nth of its batch size,"
        remedy = (
            f"give esrun --micro-batches {number} and let the script set"
            f' {_OPTION.lstrip("-")}=int(os.environ["SLURM_ELASTIC_ACCUMULATION"])'
        )
    elif needed > 1:
        remedy = (
            f"give esrun --micro-batches {needed}, and the script's option as two words outside"
            " quotes"
        )
    else:
        remedy = (
            f"give the script {_OPTION} N with an Nth of its batch size, and esrun"
            " --micro-batches N"
        )
    steps = f"{needed // world} micro-batch{'' if needed == world else 'es'}"
    option = _OPTION.lstrip("-") if is_set_in_code else _OPTION
    return (
        f"{Path(checkpoint).name} is named by steps, and on each rank a step has {steps}"
        f" ({option}): on another number of ranks the script would resume at a"
        f" wrong epoch. So the job keeps its size; {remedy}, or --micro-batches script, to have it"
        " resized all the same (docs/esrun-global-batch.md)"
    )
