"""Parts of a training on certain ranks, and the function that makes them when these change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from slurm_elastic.training.checkpoint.checkpoint_directory import CompleteCheckpoint
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.freezing.freezer import Freezing
from slurm_elastic.training.loader import Loader
from slurm_elastic.training.measure.profiling_run import ProfilingRun
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.layout_agreement import LayoutAgreement
from slurm_elastic.training.parallel.parallel_strategy import ParallelStrategy
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.loss_restart import LossRestart
from slurm_elastic.training.regroup.rebuilt_training import RebuiltTraining
from slurm_elastic.training.regroup.regrouping import Regrouping
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor, Sampler
from slurm_elastic.training.scaling_rules import BatchSize
from slurm_elastic.training.signals import Signals


class Rebuilding(NamedTuple):
    """Changes of the ranks in which the model is divided anew.

    Attributes:
        training: this rank's part in such a change.
        build: returns the parts of the training on the present ranks, from the checkpoint after a
            step.
        loss_restart: restart after the loss of a companion.
    """

    training: RebuiltTraining
    build: Callable[[Cursor], TrainingParts]
    loss_restart: LossRestart


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParts:
    """Parts of a `TrainingJob` on certain ranks.

    Attributes:
        checkpoint: the one from which the training goes on; None: it begins.
        plan: text of the execution plan; "": the layout says it all.
        full_model: not divided.
        weight_bytes: of all its parameters.
        obstacle: code of the reason why the ranks cannot change in place, or "".
        rebuilding: None: no change divides the model anew.
        freezing: None: no layers are frozen.
        profiled: None: this is no profiling run.
    """

    checkpoint: CompleteCheckpoint | None
    strategy: ParallelStrategy
    plan: str
    layout_agreement: LayoutAgreement
    full_model: torch.nn.Module
    weight_bytes: int
    optimizer: torch.optim.Optimizer
    scheduler: Any
    sampler: Sampler
    loader: Loader
    checkpoint_manager: CheckpointManager
    reporter: Reporter
    rank_group: RankGroup
    signals: Signals
    batch_size: BatchSize
    micro_batch: int | None
    step_profiler: StepProfiler
    clip_norm: float | None
    state: TrainingState
    regrouping: Regrouping
    obstacle: str
    rebuilding: Rebuilding | None = None
    freezing: Freezing | None = None
    profiled: ProfilingRun | None = None
