"""A training loop that can stop after any step and continue on other ranks.

    job = init(model, loss_fn, optimizer, dataset, global_batch=256, epochs=3, checkpoint_dir="c")
    for batch in job:
        loss = job.step(batch)
    job.finish()

The same lines run alone on a laptop, under esrun on any number of GPUs, and
after a change of that number: the loop begins where the newest checkpoint
ends, and every optimisation step takes the same samples on any ranks.

Requests are carried out between two steps only: the all-reduce of a step
carries them to all ranks, so that all stop after the same step. The script's
own code of that step has run by then.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.freezing.freezer import Freezer, Freezing
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.job_requests import JobRequests
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.memory_sizes import optimizer_bytes
from slurm_elastic.training.measure.profiling_run import ProfilingRun
from slurm_elastic.training.measure.step_times import process_age
from slurm_elastic.training.parallel.data_parallel import DataParallel
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.live_training import LiveTraining
from slurm_elastic.training.regroup.rebuilt_training import RebuiltTraining, confirm
from slurm_elastic.training.sampler import Cursor, Sampler, StepShare
from slurm_elastic.training.step_requests import StepRequests
from slurm_elastic.training.training_parts import TrainingParts

_NO_STEP = "for batch in job: the batch was not trained on; call job.step(batch) in the loop's body"


class TrainingJob:
    """A training run on this attempt's ranks; made by `init`.

    Attributes:
        model: as given, on the device, restored; with stages, the layers that this rank holds.
        optimizer, scheduler: as given; the optimizer holds the parameters of `model`.
        rank, world_size, device: of this process; they may change between two steps of the loop
            (docs/training-in-place.md).
        layout: replicas x stages, e.g. "4x1".
        resumed_from: step of the checkpoint that this attempt began with, or after which this rank
            joined it; None: it began with the first step.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._resizes = 0
        self.resumed_from: int | None
        self._cursor: Cursor
        self._set_up(parts)
        if parts.rank_group.joins:
            self._regrouping.join()
            self.resumed_from = self._cursor.step

    def _set_up(self, parts: TrainingParts) -> None:
        """Take these parts, restore the checkpoint, and connect the ranks; collective."""
        rank_group, reporter, strategy = parts.rank_group, parts.reporter, parts.strategy
        self.model = strategy.model
        self.optimizer, self.scheduler = parts.optimizer, parts.scheduler
        self.rank, self.world_size = rank_group.rank, rank_group.size
        self.device = rank_group.device
        self.layout = strategy.layout
        self._strategy = strategy
        self._layout_agreement = parts.layout_agreement
        self._sampler, self._loader = parts.sampler, parts.loader
        self._checkpoint_manager = parts.checkpoint_manager
        self._reporter, self._signals = reporter, parts.signals
        self._batch_size, self._micro_batch = parts.batch_size, parts.micro_batch
        self._step_profiler = parts.step_profiler
        self._clip_norm, self._weight_bytes = parts.clip_norm, parts.weight_bytes
        self._profile_run = parts.profiled
        self._rank_group, self._regrouping = rank_group, parts.regrouping
        self._rebuilding = parts.rebuilding
        self._requests = JobRequests(
            signals=parts.signals,
            reporter=reporter,
            checkpoint_manager=parts.checkpoint_manager,
            rank_group=rank_group,
            progress=parts.sampler.progress,
        )
        self._agreed = StepRequests()
        self._running = False
        self._profiled: MeasuredLayers | None = None
        restore_begun = time.monotonic()
        cursor = parts.checkpoint_manager.restore(parts.checkpoint) if parts.checkpoint else None
        self._restore_s = None if cursor is None else time.monotonic() - restore_begun
        self.resumed_from = None if cursor is None else cursor.step
        self._cursor = cursor or Cursor()
        rank_group.join()
        if cursor is not None and self.rank == 0:
            log_line(
                f"resumed from step {cursor.step} with {rank_group.size} rank(s),"
                f" layout {self.layout}"
            )
        self._restore_manifest_values()
        self._freezer = self._make_freezer(parts.full_model, parts.freezing)
        reporter.crossing_bytes = lambda: self._strategy.crossing_bytes
        strategy.join(fresh=cursor is None and not rank_group.companion)
        reporter.set_fields(gpus=rank_group.size, layout=self.layout, plan=parts.plan)
        self._live: LiveTraining | RebuiltTraining
        if parts.rebuilding is not None:
            self._live = parts.rebuilding.training
            self._live.cursor = self._cursor
        else:
            self._live = self._make_live(parts.state, parts.sampler, rank_group)
        parts.regrouping.attach(self._live, parts.obstacle)

    @property
    def steps_done(self) -> int:
        """Optimisation steps done since the beginning of the training."""
        return self._cursor.step

    @property
    def reduced_bytes(self) -> int:
        """Bytes that this rank contributes to the reduction of a step's gradients."""
        return self._strategy.reduced_bytes

    @property
    def frozen(self) -> int:
        """Number of layers, counted from the front, that do not train now."""
        return self._freezer.frozen if self._freezer else 0

    @property
    def penalties(self) -> tuple[float, ...]:
        """Costs of freezing 0, 1, ... layers, up to the longest prefix that may be frozen.

        Fractions of useful progress (`slurm_elastic.models.frozen_penalty`); on rank 0 only.
        """
        return self._freezer.penalties if self._freezer else (0.0,)

    def freeze(self, layers: int | None) -> None:
        """Choose how many layers are frozen, of those that may be; None: all of them.

        Rank 0's choice counts, after the next step.

        Raises:
            ValueError: a negative number.
        """
        if layers is not None and layers < 0:
            raise ValueError(
                f"freeze: {layers} layers is invalid: expected 0 or more; 0 thaws all layers"
            )
        if self._freezer:
            self._freezer.chosen = layers

    def validated(self, loss: float) -> None:
        """Pass the loss on samples that are not trained on: if it worsens, all layers thaw.

        Rank 0's counts. Without freezing it has no effect.
        """
        if self._freezer:
            self._freezer.validated(loss)

    def __iter__(self) -> Iterator[Batch]:
        if self._profile_run is not None:
            yield from self._profiling(self._profile_run)
        self._signals.exit_at_once(False)
        while not self._sampler.ended(self._cursor):
            batch_size, resizes = self._batch_size.now, self._resizes
            batches = self._loader.batches(self._remaining, rank=self.rank, step=self._cursor.step)
            for batch in self._reporter.timer.waiting(batches):
                yield batch
                if self._cursor != batch.share.after:
                    raise RuntimeError(_NO_STEP)
                self._between_steps()
                if self._batch_size.now != batch_size or self._resizes != resizes:
                    break  # the batches fetched ahead are not those of this rank any more

    def step(self, batch: Batch) -> float:
        """Train on one batch: forward, backward, reduce, update.

        Returns:
            The mean loss over the global batch, the same on all ranks.
        """
        share = batch.share
        if share.before != self._cursor:
            raise RuntimeError(
                f"job.step: the batch of step {batch.step} is invalid: expected that of step"
                f" {self._cursor.step + 1}; pass each batch of the loop once, in order"
            )
        while True:
            try:
                return self._step(batch)
            except (GroupBrokenError, RuntimeError) as error:
                self._recover(error)
            if self._cursor == share.after:
                return self._live.loss
            # The survivors share the samples of the step anew.
            loader = replace(self._loader, workers=0)
            batch = next(loader.batches(self._remaining, rank=self.rank, step=self._cursor.step))

    def _step(self, batch: Batch) -> float:
        share = batch.share
        if self._freezer:
            self._freezer.begin(share.after.step)
        requested = self._collect_requests(share.count)
        loss, agreed = self._strategy.step(batch, requested, self.optimizer.step)
        if self._freezer:
            self._freezer.observe(
                share.after.step,
                loss,
                epoch=share.after.epoch,
                progress=self._sampler.progress(share.after),
            )
        self._step_profiler.optimizing()
        if self._clip_norm is not None:
            self._strategy.clip(self._clip_norm)
        if not self._strategy.updates_itself:
            with self._batch_size.scaled(self.optimizer, share.count, gain=agreed.gain):
                self.optimizer.step()
        # A schedule may have an end, beyond which the blocks of a profile would step it.
        scheduler = None if self._profile_run else self.scheduler
        self._batch_size.advance(scheduler, share.count, last=batch.last_of_epoch, gain=agreed.gain)
        self._move_to(share.after, loss)
        self._step_profiler.end()
        self._reporter.timer.end()
        self._agreed = agreed
        self._change_as_agreed(agreed)
        return loss

    def finish(self) -> None:
        """Save the complete training and end the group of ranks."""
        self._regrouping.close()
        self._strategy.close()
        self._requests.finish(self._cursor)

    def _profiling(self, run: ProfilingRun) -> Iterator[Batch]:
        """Yield the batches of a profiling run, whose result is discarded; then end the process."""
        for batch in run.batches(self._strategy.split):
            self._cursor = batch.share.before
            yield batch
            if self._cursor != batch.share.after:
                raise RuntimeError(_NO_STEP)
        run.end()

    def _collect_requests(self, count: int) -> StepRequests:
        """Return the requests to this rank; on rank 0 also those of the controller."""
        orders = self._reporter.orders()
        self._batch_size.set_order(orders.batch, orders.directive)
        if self._freezer:
            self._freezer.ordered = orders.frozen
        requested = self._requests.collect(
            restart=self._layout_agreement.better(self._strategy.measured)
        )
        return requested._replace(
            frozen=self._freezer.requested if self._freezer else 0,
            batch=self._batch_size.requested,
            gain=self._batch_size.gain(count),
            switch=self._regrouping.requested(),
        )

    def _remaining(self) -> Iterator[StepShare]:
        return self._sampler.shares(self._cursor, self._strategy.split, batch=self._batch_size.now)

    def _move_to(self, cursor: Cursor, loss: float) -> None:
        self._cursor = self._live.cursor = cursor
        self._live.loss = loss

    def _make_live(
        self, state: TrainingState, sampler: Sampler, rank_group: RankGroup
    ) -> LiveTraining:
        """Return the parts that change with the group of ranks."""

        def follow() -> None:
            self.rank, self.world_size = rank_group.rank, rank_group.size
            self.layout = self._strategy.layout
            self._step_profiler.begin_again()
            self._checkpoint_manager.save_soon()
            self._resizes += 1

        live = LiveTraining(
            rank_group=rank_group,
            strategy=self._strategy,
            state=state,
            kept=self._checkpoint_manager.kept,
            layout_agreement=self._layout_agreement,
            batch_size=self._batch_size,
            reporter=self._reporter,
            freezer=self._freezer,
            micro_batch=self._micro_batch,
            identity={"samples": sampler.samples, "order": sampler.fingerprint()},
            on_position=self._move_to,
            on_resize=follow,
            save_alone=self._checkpoint_manager.rescue,
        )
        live.cursor = self._cursor
        return live

    def _restore_manifest_values(self) -> None:
        """Restore the values of the manifest, and register them for the next ones."""
        noise = self._reporter.noise
        restored, manifest_values = self._checkpoint_manager.restored, self._checkpoint_manager.kept
        noise.restore(restored.get("noise"))
        manifest_values["noise"] = noise.state
        self._batch_size.load_state_dict(restored.get("batch"))
        manifest_values["batch"] = self._batch_size.state_dict
        # An attempt that does not measure layers, or does not freeze, passes the old values on.
        manifest_values["profile"] = lambda: (
            m.state() if (m := self._strategy.measured) else restored.get("profile")
        )
        manifest_values["freezing"] = lambda: restored.get("freezing")
        self._batch_size.log_initial()
        self._report_share()

    def _report_share(self) -> None:
        """Report how a step's samples are divided."""
        fields = self._batch_size.report_fields(self._micro_batch)
        fields |= self._strategy.report_fields(self._batch_size.now)
        self._reporter.set_fields(**fields)

    def _make_freezer(
        self, full_model: torch.nn.Module, freezing: Freezing | None
    ) -> Freezer | None:
        if freezing is None:
            return None
        sampler = self._sampler
        freezer = Freezer(
            full_model,
            freezing,
            optimizer=self.optimizer,
            steps=sampler.epochs * -(-sampler.samples // sampler.global_batch),
            epochs=sampler.epochs,
            global_batch=sampler.global_batch,
            is_leader=self.rank == 0,
            observes=isinstance(self._strategy, DataParallel),
            log=log_line,
        )
        freezer.restore(self._checkpoint_manager.restored.get("freezing"))
        self._checkpoint_manager.kept["freezing"] = freezer.state_dict
        self._reporter.set_fields(**freezer.report_fields())
        return freezer

    def _change_as_agreed(self, agreed: StepRequests) -> None:
        """Apply the agreed batch size and frozen prefix, from the next step on."""
        if self._batch_size.apply(agreed.batch):
            self._reporter.timer.restart()
            self._report_share()
            if isinstance(self._strategy, DataParallel):
                self._strategy.rebuild()  # measures anew what of the exchange is exposed
            if self._freezer:
                self._freezer.set_batch(self._batch_size.now)
        if self._freezer and self._freezer.frozen != (n := round(agreed.frozen)):
            frozen_before = self._freezer.frozen
            self._freezer.apply(n)
            self._strategy.rebuild(list(self._freezer.prefix.buffers(frozen_before, n)))
            self._reporter.timer.restart()
            self._reporter.set_fields(**self._freezer.report_fields())

    def _between_steps(self) -> None:
        begins, self._running = not self._running, True
        if begins:
            self._checkpoint_manager.begin()
        measured = self._strategy.measured
        if measured is not None and measured is not self._profiled:
            self._profiled = measured
            if warning := self._reporter.profile(measured):
                log_line(warning)
        try:
            if begins:
                self._begin()
            agreed = self._agreed
            if agreed.stop:
                self._regrouping.close()
            if agreed.restart and self._has_companions and not (agreed.stop or agreed.notice):
                # Without a restart, with which the companions would end.
                self._divide_anew(0)
                return
            self._requests.carry_out(self._cursor, agreed)
            others = agreed.notice or agreed.restart or self._sampler.ended(self._cursor)
            if agreed.switch and not others:
                if self._rebuilding is not None:
                    self._divide_anew(round(agreed.switch))
                else:
                    self._regrouping.switch(round(agreed.switch))
        except (GroupBrokenError, RuntimeError) as error:
            self._recover(error)

    @property
    def _has_companions(self) -> bool:
        generation = self._regrouping.generation
        return (
            self._rebuilding is not None and generation is not None and bool(generation.companions)
        )

    def _recover(self, error: Exception) -> None:
        """Continue without the members that are lost, if this is what the error comes from.

        Where each rank holds a part of the model, the ranks of the job start again instead.
        """
        if self._rebuilding is not None:
            self._rebuilding.loss_restart.restart()
        elif isinstance(error, GroupBrokenError):
            self._regrouping.recover()
            return
        raise error

    def _divide_anew(self, number: int) -> None:
        """Divide the model anew, from a checkpoint of this step.

        Args:
            number: of the generation to continue in; 0: the present one.
        """
        assert self._rebuilding is not None
        if number:
            self._regrouping.pause()
        saved = self._checkpoint_manager.save(self._cursor)
        failures = torch.tensor([float(not saved)], device=self.device)
        if self.world_size > 1:
            self._rank_group.add_up([failures], "agreeing whether the checkpoint is complete")
        if failures.item():
            if number:
                self._regrouping.postpone("the checkpoint before it failed")
            else:
                self._requests.postpone_restart()
            return
        self._strategy.close()
        if number:
            # All old members have saved, so that those which are lost meanwhile are not needed.
            self._rebuilding.loss_restart.switch(
                number, lambda: confirm(self._rank_group, self._regrouping)
            )
        resumed_from = self.resumed_from
        self._set_up(self._rebuilding.build(self._cursor))
        self.resumed_from, self._running = resumed_from, True
        self._resizes += 1
        gc.collect()  # what is left of the former strategy has cycles, threads and connections
        self._reporter.timer.restart()
        self._step_profiler.begin_again()
        self._checkpoint_manager.begin()

    def _begin(self) -> None:
        """Report whether the members can change, and then that the training has begun.

        In this order: the controller may change a training that has begun, in the way that it can.
        """
        try:
            self._regrouping.begin()
            if self._rebuilding is not None and self._regrouping.generation is not None:
                self._rebuilding.loss_restart.watch()
        finally:
            self._reporter.set_fields(
                optimizer_bytes=optimizer_bytes(self.optimizer, self._weight_bytes)
            )
            self._reporter.started(
                startup_s=process_age(), restore_s=self._restore_s, step=self.resumed_from
            )
