"""Construction of a `TrainingJob` from a script's model, optimizer and dataset: `init`."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from slurm_elastic.job import profile_request
from slurm_elastic.training import excepthook, init_arguments
from slurm_elastic.training.checkpoint import training_state as states
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointDirectory
from slurm_elastic.training.env_directive import read_directive
from slurm_elastic.training.exchange.exchange_schedule import check_overlap
from slurm_elastic.training.freezing.freezer import Freezing, freezing_settings
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loader import Loader
from slurm_elastic.training.measure import profiling_run
from slurm_elastic.training.parallel.parallel_strategy import LossFunction
from slurm_elastic.training.parallel.plan_settings import PlanSettings
from slurm_elastic.training.pipeline.schedules import SCHEDULES
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.regroup_leader import RegroupLeader
from slurm_elastic.training.regroup.regroup_member import RegroupMember
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Sampler
from slurm_elastic.training.scaling_rules import DEFAULT_RULE
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.training_builder import TrainingBuilder
from slurm_elastic.training.training_job import TrainingJob

#: A module, or its layers in order.
Model: TypeAlias = torch.nn.Module | Sequence[tuple[str, torch.nn.Module]]


def init(
    model: Model,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    dataset: Any,
    *,
    global_batch: int,
    epochs: int,
    checkpoint_dir: str | os.PathLike[str],
    seed: int = 0,
    scheduler: Any = None,
    micro_batch: int | None = None,
    workers: int = 0,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    clip_norm: float | None = None,
    checkpoint_every_s: float = 600.0,
    keep: int = 2,
    background_saves: bool = False,
    extra: Mapping[str, states.Stateful] | None = None,
    application: str = "",
    freeze: str | Freezing = "off",
    batch_rule: str = DEFAULT_RULE,
    schedule: str = "1f1b",
    shard: bool = False,
    overlap: str = "auto",
    recompute: bool = False,
    spatial: Sequence[int] | None = None,
    keep_slabs: bool = False,
    tensor: int = 1,
    tensor_styles: Mapping[str, str] | None = None,
) -> TrainingJob:
    """Make a job from a model, an optimizer and a dataset, and restore its newest checkpoint.

    Args:
        model: a module, or an ordered list of (name, module). Stages need that list or an
            `nn.Sequential`, whose layers take and return a tensor or a tuple of tensors.
        loss_fn: of (output, targets): the mean over the samples, or one value for each.
        optimizer: an optimizer, or a function that makes one of the parameters.
        dataset: has `len()` and `[index]`, which returns (inputs, targets).
        global_batch: samples per optimisation step over all ranks; only the controller changes
            it, within the directive's `batch=MIN-MAX`.
        epochs: how often every sample is trained on.
        checkpoint_dir: on a file system that all nodes share.
        seed: of the samples' order and of all randomness during training.
        scheduler: of the learning rate, or a function that makes one of the optimizer; stepped
            after every optimisation step.
        micro_batch: most samples that go through the model at once; None: a rank's whole share,
            and with stages as many as keep the pipeline full.
        workers: processes per rank that fetch samples ahead.
        collate: makes a micro-batch out of samples, as in DataLoader.
        clip_norm: largest norm of the whole gradient.
        checkpoint_every_s: seconds of training between two checkpoints.
        keep: number of checkpoints that are kept.
        background_saves: continue training while a periodic checkpoint is written from a copy.
        extra: objects with `state_dict` and `load_state_dict` that are saved in the checkpoint.
        application: name of what this script trains; a user's jobs with equal names of job and
            application share their measurements. "": the job's name alone counts.
        freeze: "auto" or `Freezing`: layers may be frozen, where the directive allows it or there
            is none. The directive's `freeze=auto` alone has the same effect.
        batch_rule: change of the learning rate with the batch, where the directive lets it change:
            "sqrt", "adascale", "linear" or "constant" (docs/training-batch.md).
        schedule: of stages: "1f1b", "gpipe", or "pipedream", which trains differently: an
            update for every micro-batch, with weight stashing (docs/pipeline_runtime.md).
        shard: without stages, each rank holds a part of every parameter, of its gradient and
            optimizer state (FSDP2); whole parameters if this torch does not support it.
        overlap: without stages and `shard`: measure in the first steps whether gradients are
            exchanged faster after the backward pass or in buckets during it, "auto"; always after
            it, "none"; always in "buckets". With "auto" sums over three or more ranks may differ
            in their last bits between two runs, as the choice may. "sliced": as buckets, and
            divide the state of the optimizer among the ranks; with stages, among the replicas of
            each.
        recompute: layers keep their input only, and run again in the backward pass; not those with
            buffers, such as batch normalisation, and not in spatial groups.
        spatial: ranks that share each sample along each spatial dimension, such as (2, 1, 1), where
            the directive says `parallel=spatial` or there is none; None: all of a group's ranks
            along the first dimension (docs/spatial.md).
        keep_slabs: with spatial groups: keep what a rank has read of samples in memory.
        tensor: without stages: so many ranks share the weights of linear layers and attention, and
            with `shard` each divides its part with the other replicas, with overlap="sliced" the
            state of its optimizer; every rank is a replica
            where the number of ranks is no multiple, or layers may be frozen
            (docs/training-memory.md).
        tensor_styles: how they share layers, by name or pattern of names, such as
            {"blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}; None: pairs that torch's own
            modules show, attention, and large linear layers.

    Raises:
        CheckpointError: the newest checkpoint is of another model or another dataset.
        UnsupportedTrainingError: a training that needs `ElasticLoop`.
        ValueError: an invalid argument.
    """
    excepthook.install()
    init_arguments.check_arguments(model, loss_fn, dataset, extra)
    signals, rank_group, member = _enter_group()
    directive = read_directive()
    freezing, remark = freezing_settings(freeze)
    _check_options(schedule, clip_norm, overlap, tensor)
    profile = profile_request.asked()
    if profile is not None:
        # A profile measures plain replicas: no directive, nothing frozen.
        directive, freezing, overlap = None, None, "none"
        global_batch = profiling_run.global_batch(profile, global_batch, samples=len(dataset))
    reporter = Reporter(
        rank=rank_group.rank,
        world_size=rank_group.size,
        global_batch=global_batch,
        micro_batch=micro_batch,
        application=application,
        device=rank_group.device,
        mute=profile is not None,
    )
    full_model, layers = _whole_model(model)
    return TrainingBuilder(
        full_model,
        layers,
        loss_fn,
        optimizer,
        scheduler,
        sampler=Sampler(samples=len(dataset), global_batch=global_batch, epochs=epochs, seed=seed),
        loader=Loader(
            dataset=dataset,
            workers=workers,
            collate=collate,
            pin=rank_group.device.type == "cuda",
            seed=seed,
        ),
        checkpoint_directory=CheckpointDirectory(Path(checkpoint_dir), keep=keep, log=log_line),
        checkpoint_every_s=checkpoint_every_s,
        background_saves=background_saves,
        settings=PlanSettings(shard, overlap, recompute, micro_batch, tensor),
        clip_norm=clip_norm,
        extra=dict(extra or {}),
        application=application,
        freezing=freezing,
        remark=remark,
        batch_rule=batch_rule,
        schedule=schedule,
        spatial=spatial,
        keep_slabs=keep_slabs,
        tensor_styles=tensor_styles or {},
        directive=directive,
        profile=profile,
        reporter=reporter,
        rank_group=rank_group,
        signals=signals,
        regrouping=member or RegroupLeader(rank_group, reporter=reporter, signals=signals),
    ).first()


def _enter_group() -> tuple[Signals, RankGroup, RegroupMember | None]:
    """Begin to connect with the other ranks; on all but rank 0 also return its follower."""
    signals = Signals()
    signals.install()
    rank_group = RankGroup()
    rank_group.connect()
    member = RegroupMember(rank_group, signals=signals) if rank_group.rank else None
    if member and rank_group.companion:
        member.greet()
    return signals, rank_group, member


def _check_options(schedule: str, clip_norm: float | None, overlap: str, tensor: int) -> None:
    check_overlap(overlap)
    if tensor < 1:
        raise ValueError(f"tensor: {tensor} is invalid: expected a number of ranks, at least 1")
    if schedule not in SCHEDULES:
        raise ValueError(
            f"schedule: {schedule!r} is invalid: expected one of {', '.join(SCHEDULES)}"
        )
    if schedule == "pipedream" and clip_norm is not None:
        raise ValueError(
            f"clip_norm: {clip_norm} is invalid: expected None with schedule='pipedream', which"
            " has no gradient of the whole model; leave it out, or use schedule='1f1b'"
        )


def _whole_model(model: Model) -> tuple[torch.nn.Module, list[tuple[str, torch.nn.Module]]]:
    """Return the model, and its layers in order if it can be cut into stages."""
    if not isinstance(model, torch.nn.Module):
        names = [name for name, _ in model]
        wrong = [n for n in names if not n or "." in n or names.count(n) > 1]
        if wrong or not names:
            raise ValueError(
                f"model: layer name {wrong[0]!r} is invalid: expected unique names without a dot"
                if wrong
                else "model: an empty list is invalid: expected (name, module) pairs"
            )
        model = torch.nn.Sequential(OrderedDict(model))
    if type(model) is not torch.nn.Sequential:
        return model, []
    return model, list(model.named_children())
