"""Increments of the nice values of pending rigid jobs, so that short ones start first.

Our definition, in the order of Helios' QSSF (SC'21), which ranks jobs by predicted GPU time. A job
that is predicted to use s GPU seconds, and has waited for w seconds, gets

    most x log(s / 600) / log(10^7 / 600) x (1 - w / 86400),    each factor within 0 and 1,

rounded down to a twentieth of `most`. So no job is put back by more than `most` points of Slurm's
priority, and none for longer than a day.
"""

from __future__ import annotations

import math

#: GPU seconds of which nothing, and the most, is added: ten minutes on one GPU; two days on 58.
_LEAST_S, _MOST_S = 600.0, 1e7
_WAIT_S = 86400.0
_STEPS = 20


def added_nice(gpu_seconds: float, waited_s: float, most: int) -> int:
    """Return the increment of a job's nice value, from 0 to `most`.

    Args:
        gpu_seconds: predicted run time times GPUs.
        waited_s: since it was submitted.
        most: `[durations] rigid_nice`.
    """
    length = math.log(max(gpu_seconds, _LEAST_S) / _LEAST_S) / math.log(_MOST_S / _LEAST_S)
    patience = 1.0 - max(0.0, waited_s) / _WAIT_S
    step = max(1, most // _STEPS)
    return step * math.floor(most * min(1.0, length) * max(0.0, patience) / step)
