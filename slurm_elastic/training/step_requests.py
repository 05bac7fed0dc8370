"""Requests of a rank for the steps to come, on which all ranks agree by adding them up."""

from __future__ import annotations

from typing import NamedTuple


class StepRequests(NamedTuple):
    """Requests of one rank; their sums over all ranks are what all ranks carry out.

    Attributes:
        notice: save, and wait at the checkpoint.
        stop: Slurm ends the job.
        save: a periodic checkpoint is due.
        restart: save, and exit to be restarted in another layout.
        frozen: layers to be frozen after this step.
        batch: samples of the following steps.
        gain: AdaScale's gain of this step (scaling_rules.py).
        switch: number of the generation of ranks to continue in, or 0.
        exchange: number of the schedule by which the next step's gradients are exchanged.
    """

    notice: float = 0.0
    stop: float = 0.0
    save: float = 0.0
    restart: float = 0.0
    frozen: float = 0.0
    batch: float = 0.0
    gain: float = 0.0
    switch: float = 0.0
    exchange: float = 0.0
