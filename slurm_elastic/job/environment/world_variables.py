"""Environment variables by which each rank keeps the global batch over changes of the world.

The world is the number of ranks. The *start world* is that of the attempt that completed the job's
first checkpoint, and until then that of the present attempt: a training without a checkpoint begins
anew, so it has no batch to keep. It is kept in the file of `unmodified.resume_state`.

A *micro-batch* is the part of a batch that one rank computes at once. A step of the optimizer takes
`micro_batches` of them over all ranks, by default one for each rank of the start world.

Part of each start: imports only modules that Python has loaded already.

>>> accumulation(8, 2), accumulation(8, 3)
((4, True), (3, False))
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.job.environment.state_directory import number_after, state_directories, versions

#: Set by slurmd in jobs submitted with --elastic.
DIRECTIVE_VARIABLE = "SLURM_SPANK_ELASTIC"
_KEY = '"start_world":'
_MAX_DIGITS = 9


def accumulation(micro_batches: int, world: int) -> tuple[int, bool]:
    """Return the micro-batches of each rank in one step, and whether they keep the global batch.

    Their number is at least 1. If `micro_batches` cannot be shared evenly, all ranks together come
    as near to it as possible; of two that are equally near the larger batch is chosen, which never
    needs a smaller learning rate.
    """
    below = max(1, micro_batches // world)
    above = -(-micro_batches // world)
    steps = min((above, below), key=lambda steps: abs(steps * world - micro_batches))
    return steps, steps * world == micro_batches


def world_variables(
    env: Mapping[str, str],
    *,
    world: int,
    start_world: int | None = None,
    micro_batches: int | None = None,
    for_accelerate: bool = True,
) -> dict[str, str]:
    """Return the variables for the ranks of one attempt.

    Args:
        env: of the batch script.
        world: number of ranks.
        start_world: as kept; None: no checkpoint of the job is known.
        micro_batches: of `esrun --micro-batches`: exported for accelerate too, which then
            accumulates so many steps; None: not given, and accelerate's are not changed.
        for_accelerate: whether accelerate accumulates in the program.
    """
    start = start_world or world
    steps, exact = accumulation(micro_batches or start, world)
    variables = {
        "SLURM_ELASTIC_WORLD_SIZE": str(world),
        "SLURM_ELASTIC_START_WORLD_SIZE": str(start),
        "SLURM_ELASTIC_ACCUMULATION": str(steps),
        "SLURM_ELASTIC_ACCUMULATION_EXACT": str(int(exact)),
    }
    batch = fixed_batch(env.get(DIRECTIVE_VARIABLE, ""))
    if batch:
        variables["SLURM_ELASTIC_GLOBAL_BATCH"] = str(batch)
    if micro_batches:
        variables["SLURM_ELASTIC_MICRO_BATCHES"] = str(micro_batches)
        if for_accelerate:
            variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    return variables


def inexact_line(micro_batches: int, world: int) -> str:
    """Return a line for the job's log if the world cannot keep the global batch, or ""."""
    steps, exact = accumulation(micro_batches, world)
    if exact:
        return ""
    actual = steps * world
    return (
        f"--micro-batches {micro_batches}: {world} ranks cannot share them evenly; {steps}"
        f" on each make {actual}, a global batch of {actual / micro_batches:.0%}; allow only sizes"
        f" that divide {micro_batches}"
    )


def fixed_batch(directive: str) -> int | None:
    """Return the global batch that a directive fixes, None if it fixes none.

    >>> fixed_batch("1-8,batch=256"), fixed_batch("1-8,batch=256-1024")
    (256, None)
    """
    least, most = _batch_limits(directive)
    return least if least == most else None


def batch_may_change(env: Mapping[str, str]) -> bool:
    """Return whether the directive of the job gives its batch a range, such as `batch=256-1024`."""
    least, most = _batch_limits(env.get(DIRECTIVE_VARIABLE, ""))
    return least != most


def _batch_limits(directive: str) -> tuple[int | None, int | None]:
    for part in directive.split(","):
        key, _, value = part.partition("=")
        low, dash, high = value.strip().partition("-")
        high = high if dash else low
        if key.strip() == "batch" and _is_count(low) and _is_count(high):
            return int(low), int(high)
    return None, None


def read_start_world(env: Mapping[str, str], run_id: str) -> int | None:
    """Return the start world from the job's file; None if it has none or cannot be read."""
    for _, text in versions(state_directories(env), f"{run_id}.json"):
        world = number_after(text, _KEY)
        return world if world and world < 10**_MAX_DIGITS else None
    return None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) > 0
