"""Construction of a `TrainingJob` for the present ranks, and again when they change.

Objects of the script, of the process and of its connections stay; what depends on the number of
ranks is made anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from slurm_elastic.core.directive import Directive
from slurm_elastic.job.profile_request import ProfileRequest
from slurm_elastic.training import init_arguments
from slurm_elastic.training.checkpoint import training_state as states
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CompleteCheckpoint,
)
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager, agree
from slurm_elastic.training.exchange.exchange_schedule import SLICED, overlap_on
from slurm_elastic.training.freezing.freezer import Freezing
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loader import Loader
from slurm_elastic.training.measure import profiling_run
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayers, layers_of
from slurm_elastic.training.measure.memory_sizes import gpu_bytes, weight_bytes
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel import unsharding
from slurm_elastic.training.parallel.data_parallel import DataParallel
from slurm_elastic.training.parallel.fsdp import FullyShardedParallel, unsupported
from slurm_elastic.training.parallel.layout_agreement import LayoutAgreement
from slurm_elastic.training.parallel.layout_choice import LayoutChoice
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, ParallelStrategy
from slurm_elastic.training.parallel.pipeline_parallel import PipelineParallel
from slurm_elastic.training.parallel.plan_settings import PlanSettings
from slurm_elastic.training.parallel.recomputation import keep_activations, recompute
from slurm_elastic.training.parallel.sliced_parallel import SlicedParallel
from slurm_elastic.training.parallel.spatial_parallel import SpatialParallel, slabs_of
from slurm_elastic.training.parallel.strategy_choice import (
    StrategyChoice,
    StrategyKind,
    own_sharding,
)
from slurm_elastic.training.parallel.supported_plans import supported_options
from slurm_elastic.training.parallel.tensor_parallel import TensorParallel
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.loss_restart import LossRestart
from slurm_elastic.training.regroup.obstacles import in_place_obstacle
from slurm_elastic.training.regroup.rebuilt_training import RebuiltTraining, confirm
from slurm_elastic.training.regroup.regroup_leader import RegroupLeader
from slurm_elastic.training.regroup.regroup_member import RegroupMember
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor, Sampler
from slurm_elastic.training.scaling_rules import BatchSize, limits
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.spatial.slab_dataset import SlabDataset
from slurm_elastic.training.tied_parameters import ties
from slurm_elastic.training.training_job import TrainingJob
from slurm_elastic.training.training_parts import Rebuilding, TrainingParts

#: Seconds within which a step has to fail when a companion is lost; then the ranks end by
#: themselves.
_UNNOTICED_S = 5.0


class TrainingBuilder:
    """Builder of one training's job.

    Args:
        full_model: whole.
        layers: its layers in order, if it can be cut into stages.
        loss_fn, clip_norm, checkpoint_every_s, background_saves, extra, application, batch_rule,
            schedule, spatial, keep_slabs, tensor_styles: as of `init`.
        optimizer, scheduler: or functions that make them.
        sampler, loader, checkpoint_directory, reporter, rank_group, signals, regrouping: of the
            process.
        settings: of the script; an execution plan may replace them.
        freezing: None: no layers are frozen.
        remark: for the job's log, or "".
        directive: the submitted one.
        profile: None: this is no profiling run.
    """

    def __init__(
        self,
        full_model: torch.nn.Module,
        layers: Sequence[tuple[str, torch.nn.Module]],
        loss_fn: LossFunction,
        optimizer: Any,
        scheduler: Any,
        *,
        sampler: Sampler,
        loader: Loader,
        checkpoint_directory: CheckpointDirectory,
        checkpoint_every_s: float,
        background_saves: bool,
        settings: PlanSettings,
        clip_norm: float | None,
        extra: Mapping[str, states.Stateful],
        application: str,
        freezing: Freezing | None,
        remark: str,
        batch_rule: str,
        schedule: str,
        spatial: Sequence[int] | None,
        keep_slabs: bool,
        tensor_styles: Mapping[str, str],
        directive: Directive | None,
        profile: ProfileRequest | None,
        reporter: Reporter,
        rank_group: RankGroup,
        signals: Signals,
        regrouping: RegroupLeader | RegroupMember,
    ) -> None:
        self._full_model, self._layers, self._loss_fn = full_model, layers, loss_fn
        self._optimizer, self._scheduler = optimizer, scheduler
        self._sampler, self._loader = sampler, loader
        self._checkpoint_directory = checkpoint_directory
        self._checkpoint_every_s, self._background_saves = checkpoint_every_s, background_saves
        self._settings, self._clip_norm, self._extra = settings, clip_norm, extra
        self._application, self._freezing, self._remark = application, freezing, remark
        self._batch_rule, self._schedule = batch_rule, schedule
        self._spatial, self._keep_slabs, self._directive = spatial, keep_slabs, directive
        self._tensor_styles = tensor_styles
        self._profile, self._reporter, self._rank_group = profile, reporter, rank_group
        self._signals, self._regrouping = signals, regrouping
        self._shapes = {name: tuple(t.shape) for name, t in full_model.state_dict().items()}
        self._weight_bytes = weight_bytes(full_model)
        self._undivided = ""
        if freezing is not None:
            self._undivided = "layers that may be frozen are not divided"
        elif schedule == "pipedream":
            self._undivided = "schedule='pipedream' keeps older weights, which are not divided"
        self._identity = {"samples": sampler.samples, "order": sampler.fingerprint()}
        self._tied = ties(full_model)
        self._nodes = rank_group.nodes
        self._strategy: ParallelStrategy | None = None
        #: Parameters of the optimizer, while the model is whole.
        self._parameters: list[list[torch.nn.Parameter]] = []
        self._obstacle: str | None = None
        self._rebuilding = self._make_rebuilding()

    def first(self) -> TrainingJob:
        """Return the job of this attempt, or of a rank that joins it."""
        return TrainingJob(self._first())

    def _first(self) -> TrainingParts:
        if self._rank_group.joins and self._rebuilding is not None:
            training = self._rebuilding.training
            self._regrouping.attach(training, "")
            self._regrouping.join()
            confirm(self._rank_group, self._regrouping)
            return self._build(self._saved(training.cursor))
        # Another rank that joins gets the state from rank 0.
        restores = self._profile is None and not self._rank_group.joins
        return self._build(
            agree(self._checkpoint_directory, self._rank_group) if restores else None
        )

    def again(self, cursor: Cursor) -> TrainingParts:
        """Build the training again for the present ranks, from a checkpoint; collective."""
        assert self._strategy is not None
        self._strategy.dissolve()
        self._optimizer.state.clear()
        for group, parameters in zip(self._optimizer.param_groups, self._parameters, strict=True):
            group["params"] = list(parameters)
        return self._build(self._saved(cursor))

    def _saved(self, cursor: Cursor) -> CompleteCheckpoint:
        generation = self._regrouping.generation
        assert generation is not None
        self._rank_group.prefix = f"{generation.number}.{cursor.step}/"
        self._rank_group.nodes = self._nodes + len(generation.companions)
        return self._checkpoint_directory.named(f"step_{cursor.step:08d}")

    def _make_rebuilding(self) -> Rebuilding | None:
        """Return the helpers that divide the model again after a change of ranks; None: not needed.

        The same on all ranks, also on joining ones: it depends on the script and the submitted
        directive, and not on the layout or plan, which joining ranks do not know.
        """
        parallel = self._directive.parallel if self._directive else "data"
        sharded = self._settings.shard and not unsupported()
        sliced = self._settings.overlap == SLICED
        divided = parallel != "data" or sharded or sliced or self._settings.tensor > 1
        spatial = parallel == "spatial" or bool(self._spatial)
        others = self._freezing is not None or self._profile is not None or spatial
        if not divided or others or self._schedule == "pipedream":
            return None
        if not unsharding.possible():
            return None
        identity = self._identity | {"batch": self._sampler.global_batch}
        return Rebuilding(
            training=RebuiltTraining(self._shapes, identity),
            build=self.again,
            loss_restart=LossRestart(
                self._rank_group,
                self._regrouping,
                signals=self._signals,
                save=lambda: "the newest checkpoint stays",
                unnoticed_s=_UNNOTICED_S,
            ),
        )

    def _build(self, checkpoint: CompleteCheckpoint | None) -> TrainingParts:
        rank_group, reporter, full_model = self._rank_group, self._reporter, self._full_model
        earlier_profile = (
            MeasuredLayers.restored(checkpoint.kept.get("profile")) if checkpoint else None
        )
        layout_agreement = LayoutAgreement(
            rank_group,
            [(name, any(True for _ in module.parameters())) for name, module in self._layers],
            directive=self._directive,
            reporter=reporter,
            measured=earlier_profile,
            share=-(-self._sampler.global_batch // rank_group.size),
            space=0 if self._profile else math.prod(self._spatial or (0,)),
            tensor=1 if self._profile else self._settings.tensor,
            undivided=self._undivided,
        )
        layout_choice = layout_agreement.choice
        settings = self._settings.under(layout_choice.plan, global_batch=self._sampler.global_batch)
        slabs = slabs_of(
            self._loader.dataset,
            self._spatial,
            layout_choice,
            keep=self._keep_slabs,
            rank=rank_group.rank,
        )
        loader = self._loader
        if slabs:
            loader = replace(loader, dataset=slabs, ranks_per_sample=slabs.grid.size)
        if layout_choice.tensor > 1:
            loader = replace(loader, ranks_per_sample=layout_choice.tensor)
        strategy_choice = StrategyChoice.of(
            layout_choice,
            settings,
            ranks=rank_group.size,
            has_layers=bool(self._layers),
            schedule=self._schedule,
            unsupported=unsupported(),
        )
        self._log(strategy_choice.remark)
        if not strategy_choice.staged:
            full_model.to(rank_group.device)
        self._make_optimizer()
        if not slabs:
            keep_activations(layers_of(full_model))
        self._report_supported_options(spatial=layout_choice.spatial)
        profiles_layers = strategy_choice.kind is StrategyKind.DATA and not self._profile
        step_profiler = StepProfiler(
            timer=reporter.timer,
            noise=reporter.noise,
            parameters=[p for p in full_model.parameters() if p.requires_grad],
            rank_group=rank_group,
            profiler=LayerProfiler(
                layers_of(full_model), device=rank_group.device, earlier=earlier_profile
            )
            if profiles_layers
            else None,
        )
        strategy = self._strategy = self._make_strategy(
            strategy_choice,
            layout_choice,
            settings,
            slabs=slabs,
            fresh=checkpoint is None,
            earlier_profile=earlier_profile,
            step_profiler=step_profiler,
        )
        if not slabs and settings.recompute:
            self._recompute()
        state = states.TrainingState(
            model=strategy.model,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            extra=self._extra,
            full_shapes=self._shapes,
            aliases={alias: names[0] for names in self._tied for alias in names[1:]},
            part=strategy.writers.index(rank_group.rank)
            if rank_group.rank in strategy.writers
            else 0,
        )
        checkpoint_manager = CheckpointManager(
            self._checkpoint_directory,
            state,
            rank_group,
            writers=strategy.writers,
            background=self._background_saves,
            every_s=self._checkpoint_every_s,
            identity=self._identity,
            log=log_line,
        )
        batch_size = BatchSize(
            self._sampler.global_batch,
            limits=limits(self._sampler.global_batch, self._directive),
            rule=self._batch_rule,
            replicas=len(layout_choice.layout.stages[0]),
            noise=reporter.noise.fields,
            is_leader=rank_group.rank == 0,
            log=log_line,
        )
        if self._obstacle is None:
            rebuilt = self._rebuilding is not None
            self._obstacle = in_place_obstacle(
                spatial=bool(slabs),
                staged=not rebuilt and (strategy_choice.staged or layout_agreement.may_be_staged),
                # Of a single rank, too: ranks that join would divide the state.
                sharded=not rebuilt
                and (strategy_choice.divides_parameters or settings.overlap == SLICED),
                profile=self._profile is not None,
                device=rank_group.device,
            )
        return TrainingParts(
            checkpoint=checkpoint,
            strategy=strategy,
            plan=str(layout_choice.used_plan(strategy_choice.sharding) or ""),
            layout_agreement=layout_agreement,
            full_model=full_model,
            weight_bytes=self._weight_bytes,
            optimizer=self._optimizer,
            scheduler=self._scheduler,
            sampler=self._sampler,
            loader=loader,
            checkpoint_manager=checkpoint_manager,
            reporter=reporter,
            rank_group=rank_group,
            signals=self._signals,
            batch_size=batch_size,
            micro_batch=settings.micro_batch,
            step_profiler=step_profiler,
            clip_norm=self._clip_norm,
            freezing=self._freezing,
            state=state,
            regrouping=self._regrouping,
            obstacle=self._obstacle,
            rebuilding=self._rebuilding,
            profiled=profiling_run.prepared(
                self._profile,
                full_model,
                application=self._application,
                sampler=self._sampler,
                loader=loader,
                rank_group=rank_group,
            ),
        )

    def _report_supported_options(self, *, spatial: bool) -> None:
        """Report the options of plans that this training supports, before it is divided."""
        if self._rank_group.rank or spatial:
            return
        supported = supported_options(
            self._full_model,
            self._layers,
            self._optimizer,
            recompute=self._settings.recompute,
            # Objects of the script may have the shapes of whole parameters (e.g. averaged weights).
            restricted=self._freezing is not None
            or self._schedule == "pipedream"
            or bool(self._extra),
            undivided=self._undivided,
            styles=self._tensor_styles,
            own_sharding=own_sharding(self._settings, unsupported=unsupported()),
            own_tensor=1 if self._undivided else self._settings.tensor,
        )
        self._reporter.announce(
            supported_options=str(supported),
            weight_bytes=self._weight_bytes,
            gpu_bytes=gpu_bytes(self._rank_group.device),
        )

    def _make_optimizer(self) -> None:
        """Call functions that make optimizer and scheduler, when the job is built first."""
        if self._parameters:
            return
        optimizer, scheduler = self._optimizer, self._scheduler
        if not isinstance(optimizer, torch.optim.Optimizer) and callable(optimizer):
            optimizer = optimizer(self._full_model.parameters())
        init_arguments.check_optimizer(optimizer)
        if isinstance(scheduler, type) or not hasattr(scheduler, "state_dict"):
            scheduler = scheduler(optimizer) if callable(scheduler) else scheduler
        init_arguments.check_scheduler(scheduler)
        states.check(states.TrainingState(model=self._full_model, optimizer=optimizer))
        self._optimizer, self._scheduler = optimizer, scheduler
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        sampler = self._sampler
        self._log(
            self._remark,
            init_arguments.epoch_schedule_warning(
                scheduler,
                epochs=sampler.epochs,
                steps_per_epoch=-(-sampler.samples // sampler.global_batch),
            ),
        )

    def _make_strategy(
        self,
        strategy_choice: StrategyChoice,
        layout_choice: LayoutChoice,
        plan_settings: PlanSettings,
        *,
        slabs: SlabDataset | None,
        fresh: bool,
        earlier_profile: MeasuredLayers | None,
        step_profiler: StepProfiler,
    ) -> ParallelStrategy:
        settings: dict[str, Any] = {
            "micro_batch": plan_settings.micro_batch,
            "rank_group": self._rank_group,
            "signals": self._signals,
            "step_profiler": step_profiler,
        }
        model, optimizer = self._full_model, self._optimizer
        kind, sliced = strategy_choice.kind, strategy_choice.sliced
        if strategy_choice.divides_parameters:
            self._rank_group.join()
            if fresh and not strategy_choice.staged:
                self._rank_group.broadcast(model.state_dict().values())
        overlap = "none" if plan_settings.overlap == SLICED else plan_settings.overlap
        overlap = overlap_on(self._rank_group.device.type, overlap)
        if kind is StrategyKind.PIPELINE:
            return PipelineParallel(
                self._layers,
                layout_choice,
                self._loss_fn,
                schedule=self._schedule,
                ties=self._tied,
                earlier=earlier_profile,
                optimizer=optimizer,
                styles=self._tensor_styles,
                overlap=overlap,
                sliced=sliced,
                log=self._log,
                **settings,
            )
        if kind is StrategyKind.SLICED:
            return SlicedParallel(model, optimizer, self._loss_fn, **settings)
        if kind is StrategyKind.FULLY_SHARDED:
            return FullyShardedParallel(
                model,
                optimizer,
                self._loss_fn,
                tensor=layout_choice.tensor,
                styles=self._tensor_styles,
                overlap=overlap,
                log=self._log,
                **settings,
            )
        if kind is StrategyKind.TENSOR:
            return TensorParallel(
                model,
                optimizer,
                self._loss_fn,
                size=layout_choice.tensor,
                styles=self._tensor_styles,
                overlap=overlap,
                sliced=sliced,
                log=self._log,
                **settings,
            )
        if slabs:  # the kind is SPATIAL
            return SpatialParallel(
                model,
                self._loss_fn,
                grid=slabs.grid,
                extents=slabs.extents,
                layout=str(layout_choice.text),
                overlap=overlap,
                log=log_line,
                **settings,
            )
        return DataParallel(model, self._loss_fn, overlap=overlap, log=log_line, **settings)

    def _recompute(self) -> None:
        """Recompute activations where that is possible; log where it is not."""
        done, left = recompute(layers_of(self._full_model))
        if left or not done:
            self._log(
                f"recompute: {done} layers run again in the backward pass, {left} with buffers do"
                " not"
            )

    def _log(self, *lines: str) -> None:
        for line in filter(None, lines):
            if self._rank_group.rank == 0:
                log_line(line)
