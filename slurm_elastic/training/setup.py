"""Construction of a `TrainingJob` from a script's model, optimizer and dataset: `init`."""

from __future__ import annotations

import math
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
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager, agree
from slurm_elastic.training.env_directive import read_directive
from slurm_elastic.training.exchange.exchange_schedule import SLICED, check_overlap
from slurm_elastic.training.freezing.freezer import Freezing, freezing_settings
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loader import Loader
from slurm_elastic.training.measure import profiling_run
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayers, layers_of
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.data_parallel import DataParallel
from slurm_elastic.training.parallel.fsdp import FullyShardedParallel, unsupported
from slurm_elastic.training.parallel.layout_agreement import LayoutAgreement
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, ParallelStrategy
from slurm_elastic.training.parallel.pipeline_parallel import PipelineParallel
from slurm_elastic.training.parallel.plan_settings import PlanSettings
from slurm_elastic.training.parallel.recomputation import recompute as recompute_layers
from slurm_elastic.training.parallel.sliced_parallel import SlicedParallel
from slurm_elastic.training.parallel.spatial_parallel import SpatialParallel, slabs_of
from slurm_elastic.training.parallel.tied_parameters import ties
from slurm_elastic.training.pipeline.schedules import SCHEDULES
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.obstacles import in_place_obstacle
from slurm_elastic.training.regroup.regroup_leader import RegroupLeader
from slurm_elastic.training.regroup.regroup_member import RegroupMember
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Sampler
from slurm_elastic.training.scaling_rules import DEFAULT_RULE, BatchSize, limits
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.spatial.slab_dataset import SlabDataset
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
    overlap: str = "none",
    recompute: bool = False,
    spatial: Sequence[int] | None = None,
    keep_slabs: bool = False,
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
            "sqrt", "adascale", "linear" or "constant" (docs/training.md).
        schedule: of stages: "1f1b", "gpipe", or "pipedream", which trains differently: an
            update for every micro-batch, with weight stashing (docs/pipeline_runtime.md).
        shard: without stages, each rank holds a part of every parameter, of its gradient and
            optimizer state (FSDP2); whole parameters if this torch does not support it.
        overlap: without stages and `shard`: exchange gradients after the backward pass, "none"; in
            "buckets" during it; or "auto": measure in the first steps which of them is faster.
            "sliced": as buckets, and divide the state of the optimizer among the ranks.
        recompute: layers keep their input only, and run again in the backward pass; not those with
            buffers, such as batch normalisation, and not in spatial groups.
        spatial: ranks that share each sample along each spatial dimension, such as (2, 1, 1), where
            the directive says `parallel=spatial` or there is none; None: all of a group's ranks
            along the first dimension (docs/spatial.md).
        keep_slabs: with spatial groups: keep what a rank has read of samples in memory.

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
    _check_options(schedule, clip_norm, overlap)
    profile = profile_request.asked()
    if profile is not None:
        # A profile measures plain replicas: no directive, nothing frozen.
        directive, freezing, overlap = None, None, "none"
        global_batch = profiling_run.global_batch(profile, global_batch, samples=len(dataset))
    sampler = Sampler(samples=len(dataset), global_batch=global_batch, epochs=epochs, seed=seed)
    reporter = Reporter(
        rank=rank_group.rank,
        world_size=rank_group.size,
        global_batch=global_batch,
        micro_batch=micro_batch,
        application=application,
        device=rank_group.device,
        mute=profile is not None,
    )
    checkpoint_directory = CheckpointDirectory(Path(checkpoint_dir), keep=keep, log=log_line)
    # A rank that joins gets the state from rank 0.
    restores = profile is None and not rank_group.companion
    checkpoint = agree(checkpoint_directory, rank_group) if restores else None
    earlier_profile = (
        MeasuredLayers.restored(checkpoint.kept.get("profile")) if checkpoint else None
    )
    full_model, layers = _whole_model(model)
    layout_agreement = LayoutAgreement(
        rank_group,
        [(name, any(True for _ in module.parameters())) for name, module in layers],
        directive=directive,
        reporter=reporter,
        measured=earlier_profile,
        share=-(-global_batch // rank_group.size),
        space=0 if profile else math.prod(spatial or (0,)),
    )
    shard, overlap, recompute, micro_batch = PlanSettings(
        shard, overlap, recompute, micro_batch
    ).under(layout_agreement.choice.plan, global_batch=global_batch)
    slabs = slabs_of(
        dataset, spatial, layout_agreement.choice, keep=keep_slabs, rank=rank_group.rank
    )
    staged = layout_agreement.choice.staged or (schedule == "pipedream" and bool(layers))
    sharded = shard and not staged and not slabs and _can_shard(rank_group)
    sliced = overlap == SLICED and not (staged or sharded or slabs) and rank_group.size > 1
    if not staged:
        full_model.to(rank_group.device)
    optimizer, scheduler = _make_optimizer(optimizer, scheduler, full_model)
    _log(
        rank_group,
        remark,
        init_arguments.epoch_schedule_warning(
            scheduler, epochs=epochs, steps_per_epoch=-(-len(dataset) // global_batch)
        ),
    )
    if recompute and not slabs:
        _recompute(full_model, rank_group)
    shapes = {name: tuple(tensor.shape) for name, tensor in full_model.state_dict().items()}
    tied = ties(full_model)
    profiler = LayerProfiler(
        layers_of(full_model), device=rank_group.device, earlier=earlier_profile
    )
    step_profiler = StepProfiler(
        timer=reporter.timer,
        noise=reporter.noise,
        parameters=[p for p in full_model.parameters() if p.requires_grad],
        rank_group=rank_group,
        profiler=None if staged or sharded or sliced or slabs or profile else profiler,
    )
    strategy: ParallelStrategy
    if staged:
        strategy = PipelineParallel(
            layers,
            layout_agreement.choice,
            loss_fn,
            schedule=schedule,
            ties=tied,
            micro_batch=micro_batch,
            rank_group=rank_group,
            signals=signals,
            step_profiler=step_profiler,
            earlier=earlier_profile,
        )
        _remove_foreign_parameters(optimizer, strategy.model)
    elif sharded:
        rank_group.join()
        if checkpoint is None:
            rank_group.broadcast(full_model.state_dict().values())
        strategy = FullyShardedParallel(
            full_model,
            optimizer,
            loss_fn,
            micro_batch=micro_batch,
            rank_group=rank_group,
            signals=signals,
            step_profiler=step_profiler,
        )
    else:
        strategy = _replicas(
            full_model,
            optimizer,
            loss_fn,
            overlap=overlap if sliced or overlap != SLICED else "none",
            slabs=slabs,
            layout=str(layout_agreement.choice.text),
            micro_batch=micro_batch,
            rank_group=rank_group,
            signals=signals,
            step_profiler=step_profiler,
        )
    state = states.TrainingState(
        model=strategy.model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra=dict(extra or {}),
        full_shapes=shapes,
        aliases={alias: names[0] for names in tied for alias in names[1:]},
        part=strategy.writers.index(rank_group.rank) if rank_group.rank in strategy.writers else 0,
    )
    checkpoint_manager = CheckpointManager(
        checkpoint_directory,
        state,
        rank_group,
        writers=strategy.writers,
        background=background_saves,
        every_s=checkpoint_every_s,
        identity={"samples": sampler.samples, "order": sampler.fingerprint()},
        log=log_line,
    )
    loader = Loader(
        dataset=slabs or dataset,
        workers=workers,
        collate=collate,
        pin=rank_group.device.type == "cuda",
        seed=seed,
        ranks_per_sample=slabs.grid.size if slabs else 1,
    )
    batch_size = BatchSize(
        global_batch,
        limits=limits(global_batch, directive),
        rule=batch_rule,
        replicas=len(layout_agreement.choice.layout.stages[0]),
        noise=reporter.noise.fields,
        is_leader=rank_group.rank == 0,
        log=log_line,
    )
    obstacle = in_place_obstacle(
        staged=staged or bool(slabs) or layout_agreement.may_be_staged,
        # Of a single rank, too: ranks that join would divide the state.
        sharded=sharded or (overlap == SLICED and not slabs),
        profile=profile is not None,
        device=rank_group.device,
    )
    return TrainingJob(
        checkpoint,
        strategy=strategy,
        layout_agreement=layout_agreement,
        full_model=full_model,
        optimizer=optimizer,
        scheduler=scheduler,
        sampler=sampler,
        loader=loader,
        checkpoint_manager=checkpoint_manager,
        reporter=reporter,
        rank_group=rank_group,
        signals=signals,
        batch_size=batch_size,
        micro_batch=micro_batch,
        step_profiler=step_profiler,
        clip_norm=clip_norm,
        freezing=freezing,
        state=state,
        regrouping=member or RegroupLeader(rank_group, reporter=reporter, signals=signals),
        obstacle=obstacle,
        profiled=profiling_run.prepared(
            profile,
            full_model,
            application=application,
            sampler=sampler,
            loader=loader,
            rank_group=rank_group,
        ),
    )


def _can_shard(rank_group: RankGroup) -> bool:
    """Return whether ranks can hold parts of the parameters; log why not."""
    reason = unsupported()
    if reason and rank_group.size > 1:
        _log(rank_group, f"{reason}; every rank holds the whole model")
    return rank_group.size > 1 and not reason


def _recompute(full_model: torch.nn.Module, rank_group: RankGroup) -> None:
    """Recompute activations where that is possible; log where it is not."""
    done, left = recompute_layers(layers_of(full_model))
    if left or not done:
        _log(
            rank_group,
            f"recompute: {done} layers run again in the backward pass, {left} with buffers do not",
        )


def _enter_group() -> tuple[Signals, RankGroup, RegroupMember | None]:
    """Begin to connect with the other ranks; return what follows rank 0, on all but that."""
    signals = Signals()
    signals.install()
    rank_group = RankGroup()
    rank_group.connect()
    member = RegroupMember(rank_group, signals=signals) if rank_group.rank else None
    if member and rank_group.companion:
        member.greet()
    return signals, rank_group, member


def _make_optimizer(optimizer: Any, scheduler: Any, full_model: torch.nn.Module) -> tuple[Any, Any]:
    """Return optimizer and scheduler; functions that make them are called."""
    if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
        optimizer = optimizer(full_model.parameters())
    init_arguments.check_optimizer(optimizer)
    if isinstance(scheduler, type) or not hasattr(scheduler, "state_dict"):
        scheduler = scheduler(optimizer) if callable(scheduler) else scheduler
    init_arguments.check_scheduler(scheduler)
    states.check(states.TrainingState(model=full_model, optimizer=optimizer))
    return optimizer, scheduler


def _log(rank_group: RankGroup, *lines: str) -> None:
    for line in filter(None, lines):
        if rank_group.rank == 0:
            log_line(line)


def _replicas(
    full_model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction,
    *,
    overlap: str,
    slabs: SlabDataset | None,
    layout: str,
    **settings: Any,
) -> ParallelStrategy:
    """Return the strategy of ranks that hold the whole model; further settings: of its class."""
    if slabs:
        return SpatialParallel(
            full_model,
            loss_fn,
            grid=slabs.grid,
            extents=slabs.extents,
            layout=layout,
            overlap=overlap,
            log=log_line,
            **settings,
        )
    if overlap == SLICED:
        return SlicedParallel(full_model, optimizer, loss_fn, **settings)
    return DataParallel(full_model, loss_fn, overlap=overlap, log=log_line, **settings)


def _check_options(schedule: str, clip_norm: float | None, overlap: str) -> None:
    check_overlap(overlap)
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


def _remove_foreign_parameters(optimizer: torch.optim.Optimizer, held: torch.nn.Module) -> None:
    """Remove parameters from the optimizer that this rank does not hold."""
    held_ids = {id(p) for p in held.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in held_ids]
