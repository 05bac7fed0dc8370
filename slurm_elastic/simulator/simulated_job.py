"""One simulated job: its training over time, and what is learned of it.

After `Job.step` and `update_local_bsz` of Sia's artifact (SOSP'23): a change of GPU type or shape
costs the job a restart; then it makes progress epoch by epoch, each rounded to whole seconds, and
chooses its batch again at the end of every epoch and every interval. Only the number of GPUs on
each node matters, not which nodes: a move in the same shape is free.

Jobs that are changed without a requeue: in_place_job.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from slurm_elastic.core.application import JobClass, Learned, Noise, Observation
from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.models.application_pool import ApplicationPool, merged
from slurm_elastic.simulator.applications import DescribedApplication
from slurm_elastic.simulator.batch_split import BatchSplitter
from slurm_elastic.simulator.truth.frozen_layers import FrozenLayers
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads.application_profiles import Shape, smallest_rotation
from slurm_elastic.simulator.workloads.workload import SubmittedJob

#: Shorter waits are rounding errors.
INSTANT_S = 1e-6


class SimulatedJob:
    """State of a job; mutable. Times are seconds since the workload's start.

    Attributes:
        adaptive_batch: its batch is chosen for goodput; else the user's batch is kept.
        compat: it fits its model, and chooses its batches, as the artifact does.
        restart_s: seconds of each restart.
        restart_left_s: seconds left of the present restart.
        allocation: GPUs held; None: it waits.
        shape: GPUs that train on each of its nodes, in the smallest rotation.
        micro_batch, accumulation: present split of its batch.
        epoch, progress: epochs and progress made.
        starts: how often it was started: with its first GPUs, others, or in another shape.
        changes_in_place: how often its GPUs changed without a start.
        started_s, changed_s: last start, and last change of its GPUs; None before.
        start_s, completion_s: first start and end; None before.
        gpu_s: GPU seconds held.
        lost_gpu_s: GPU seconds spent restarting, or without ranks yet.
        layers: front layers that may freeze; None: none.
        extra_s: seconds added to each step for crossing racks (truth/rack_network.py).
        crossing_gpu_s: GPU seconds lost to crossing racks.
        racks: number of racks it is in; 0 without racks, or while it waits.
        places: (step with `extra_s`, without synchronisation) by (type, nodes, GPUs, micro-batch,
            racks), as first measured; {} without racks.
        batch: global batch ordered by the policy; None: its own choice.
        first_noise: gradient noise first measured in the first epoch; None: not measured.
        shared_speed: speed beside the jobs on its nodes, relative to that alone.
        residuals: whether its models correct their fits (models/step_residuals.py).
    """

    __slots__ = (
        "_believed",
        "_learned",
        "_pool",
        "_seen",
        "_tuning",
        "accumulation",
        "adaptive_batch",
        "allocation",
        "batch",
        "changed_s",
        "changes_in_place",
        "compat",
        "completion_s",
        "crossing_gpu_s",
        "described",
        "epoch",
        "extra_s",
        "first_noise",
        "gpu_s",
        "gpu_type",
        "job_id",
        "layers",
        "lost_gpu_s",
        "micro_batch",
        "noise",
        "now_s",
        "observations",
        "places",
        "progress",
        "racks",
        "residuals",
        "restart_left_s",
        "restart_s",
        "shape",
        "shared_speed",
        "start_s",
        "started_s",
        "starts",
        "submitted",
        "truth",
    )

    def __init__(
        self,
        submitted: SubmittedJob,
        truth: GroundTruth,
        described: DescribedApplication,
        *,
        job_id: int,
        restart_s: float,
        compat: bool = False,
        adaptive_batch: bool = True,
        layers: FrozenLayers | None = None,
        residuals: bool = False,
    ) -> None:
        self.submitted = submitted
        self.truth = truth
        self.described = described
        self.job_id = job_id
        self.restart_s = restart_s
        self.compat = compat
        self.layers = layers
        self.residuals = residuals
        self.adaptive_batch = (
            adaptive_batch and described.application.job_class is JobClass.ADAPTIVE
        )
        self.restart_left_s = 0.0
        self.allocation: Allocation | None = None
        self.gpu_type = ""
        self.shape: Shape = ()
        self.micro_batch = 0
        self.accumulation = 0
        self.batch: int | None = None
        self.epoch = 0
        self.progress = 0.0
        self.starts = 0
        self.changes_in_place = 0
        self.started_s: float | None = None
        self.start_s: float | None = None
        self.changed_s: float | None = None
        self.completion_s: float | None = None
        self.gpu_s = 0.0
        self.lost_gpu_s = 0.0
        self.extra_s = 0.0
        self.shared_speed = 1.0
        self.racks = 0
        self.places: Mapping[tuple[str, int, int, int, int], tuple[float, float]] = {}
        self.crossing_gpu_s = 0.0
        self.now_s = submitted.time_s
        self.observations: tuple[Observation, ...] = ()
        self.noise: Noise | None = None
        self.first_noise: Noise | None = None
        #: Measurements of its application; and own ones with those, as of a number of own ones.
        self._pool = ApplicationPool()
        self._believed: tuple[int, tuple[Observation, ...]] = (0, ())
        self._seen: frozenset[tuple[str, int, int, int]] = frozenset()
        self._learned: Learned | None = None
        #: Arguments of the last splitter, and that splitter.
        self._tuning: tuple[tuple[object, ...], BatchSplitter] | None = None

    @property
    def restarts(self) -> int:
        """Number of restarts after the first start."""
        return max(0, self.starts - 1)

    @property
    def gpus(self) -> int:
        """Number of GPUs held."""
        return self.allocation.gpus if self.allocation is not None else 0

    @property
    def companions(self) -> tuple[Companion, ...]:
        """Jobs that hold a part of its GPUs."""
        return ()

    @property
    def resize_s(self) -> float | None:
        """Seconds without training of a change without a requeue; None: it cannot have one."""
        return None

    @property
    def changed_after_s(self) -> float:
        """Seconds until the change of its GPUs that is under way goes on, or ends."""
        return self.restart_left_s

    @property
    def changing(self) -> bool:
        """Whether a change of its GPUs is under way."""
        return self.restart_left_s > 0

    @property
    def learned(self) -> Learned:
        """Observations of the job so far; the same object until there is a new one."""
        if self._learned is None:
            self._learned = Learned(
                self.described.application,
                self.believed,
                self.noise,
                self.layers.prefixes if self.layers else None,
                self.residuals,
            )
        return self._learned

    def inherit(self, observations: tuple[Observation, ...], noise: Noise | None) -> None:
        """Start with the observations of earlier jobs of the application."""
        self.observations, self.noise = observations, noise
        self._seen = frozenset((o.gpu_type, o.nodes, o.gpus, o.micro_batch) for o in observations)
        self._learned = None

    def join(self, pool: ApplicationPool, noise: Noise | None) -> None:
        """Start with the pool of the application, and the noise of its first epoch."""
        self.noise = noise
        self.update(pool)

    def update(self, pool: ApplicationPool) -> None:
        """Take the pool of the application as it is now."""
        self._pool, self._believed = pool, (-1, ())
        self._learned = None

    @property
    def believed(self) -> tuple[Observation, ...]:
        """Observations that its models are fitted to; the same tuple until there is a new one."""
        if not self._pool.points:
            return self.observations
        if self._believed[0] != len(self.observations):
            self._believed = (len(self.observations), merged(self.observations, self._pool))
        return self._believed[1]

    def copy(self) -> SimulatedJob:
        """Return an independent copy; shared parts are immutable or caches."""
        duplicate = copy.copy(self)
        duplicate.layers = copy.copy(self.layers)
        return duplicate

    def advance(self, until_s: float) -> None:
        """Let time pass until `until_s`, or until the job's completion.

        Raises:
            ApplicationProfileError: the tables have no speed for its placement.
        """
        seconds = until_s - self.now_s
        if not self.shape or self.completion_s is not None:
            self.now_s = until_s
            return
        gpus, truth = self.allocation.amount if self.allocation else 0, self.truth
        idle = self.gpus - sum(self.shape)
        delay = min(self.restart_left_s, seconds)
        if delay:
            self.restart_left_s -= delay
            if self.restart_left_s < INSTANT_S:
                self.restart_left_s = 0.0
            self.gpu_s += delay * gpus
            self.lost_gpu_s += delay * gpus
            self.now_s += delay
            seconds -= delay
        while seconds > 0:
            if self.layers is not None and self.layers.certify(self.progress / truth.total):
                self._freeze()
            rate = truth.goodput(
                self.gpu_type, self.shape, self.micro_batch, self.accumulation, self.epoch
            )
            slowed = self._rack_slowdown()
            rate *= slowed * self.shared_speed
            if self.layers is not None:
                rate *= self.layers.gain(*self._iteration(), accumulation=self.accumulation)
            seconds_before, progress_before = seconds, self.progress
            self._observe()
            target = truth.targets[self.epoch]
            if self.progress + rate * seconds < target:
                self.progress += rate * seconds
                self._add_time(seconds, gpus, idle)
                seconds = 0.0
            else:
                # Epochs last whole seconds, as in the artifact.
                delta = min(float(round((target - self.progress) / rate)), seconds)
                self.progress = target
                self.epoch += 1
                self._add_time(delta, gpus, idle)
                seconds -= delta
            if self.layers is not None:
                self.layers.passed(seconds_before - seconds, self.progress - progress_before)
            self.crossing_gpu_s += (seconds_before - seconds) * gpus * (1 - slowed)
            if self.epoch == len(truth.targets):
                self.completion_s = self.now_s
                return
            self._choose_batch()
        self.now_s = until_s

    def hold(self, allocation: Allocation | None, *, moving_costs: bool = False) -> None:
        """Change the GPUs that the job holds.

        Args:
            allocation: GPUs from now on; None: none.
            moving_costs: whether a move to other nodes in the same shape is a restart as well; else
                it is free, as in Sia's artifact. A job that is restarting pays no more.
        """
        old_allocation, self.allocation = self.allocation, allocation
        if allocation is None:
            self.gpu_type, self.shape = "", ()
            self.restart_left_s = 0.0
            return
        shape = smallest_rotation(g for _, g in allocation.shares)
        moves = moving_costs and self.restart_left_s <= 0 and old_allocation != allocation
        if (allocation.gpu_type, shape) == (self.gpu_type, self.shape) and not moves:
            return
        self.gpu_type, self.shape = allocation.gpu_type, shape
        self.starts += 1
        self.changed_s = self.started_s = self.now_s
        self.start_s = self.now_s if self.start_s is None else self.start_s
        self.restart_left_s = self.restart_s
        self._choose_batch()
        self._freeze()

    def _freeze(self) -> None:
        """Freeze the layers that its configuration calls for, and update what is known of them."""
        if self.layers is None:
            return
        old_prefixes = self.layers.prefixes
        self.layers.freeze(
            self.learned, gpu_type=self.gpu_type, nodes=len(self.shape), gpus=sum(self.shape)
        )
        if self.layers.prefixes != old_prefixes or self.learned.prefixes != old_prefixes:
            self._learned = None

    def _iteration(self) -> tuple[float, float]:
        """Return `GroundTruth.iteration` in the present configuration, with nothing frozen."""
        return self.truth.iteration(self.gpu_type, self.shape, self.micro_batch)

    def order(self, batch: int | None) -> None:
        """Set the global batch from now on, without a restart; None: keep it."""
        if batch is None or batch == self.batch:
            return
        self.batch = batch
        if self.shape:
            self._choose_batch()

    def _rack_slowdown(self) -> float:
        """Return the part of its speed that remains when it crosses racks."""
        if not self.extra_s:
            return 1.0
        step, micro = self._iteration()
        if self.layers is not None:
            step, micro = self.layers.times(step, micro)
        seconds = step + self.accumulation * micro
        return seconds / (seconds + self.extra_s)

    def _add_time(self, seconds: float, gpus: float, idle: int) -> None:
        self.now_s += seconds
        self.gpu_s += seconds * gpus
        self.lost_gpu_s += seconds * idle

    def _observe(self) -> None:
        """Measure the present configuration; the first time of equal configurations counts."""
        key = (self.gpu_type, len(self.shape), sum(self.shape), self.micro_batch)
        if key not in self._seen:
            self._seen |= {key}
            observation = Observation(*key, *self._iteration())
            if self.layers is not None:
                observation = self.layers.observed(observation)
            self.observations = (*self.observations, observation)
            self._learned = None
        place = (*key, self.racks)
        if self.racks and place not in self.places:
            step, micro = self.truth.iteration(self.gpu_type, self.shape, self.micro_batch)
            self.places = {**self.places, place: (step + self.extra_s, micro)}
        batch = self.truth.batch(self.gpu_type, self.shape, self.micro_batch, self.accumulation)
        noise = self.truth.noise(batch, self.epoch)
        if noise is not self.noise:
            self.noise = noise
            self._learned = None
        if self.first_noise is None and self.epoch == 0:
            self.first_noise = noise

    def _choose_batch(self) -> None:
        """Choose the batch with the best goodput by the job's model; a fixed one if not elastic."""
        application, truth = self.described.application, self.truth
        configuration = self.gpu_type, self.shape
        if self.batch is not None and self.adaptive_batch and application.micro_batches == 1:
            self.micro_batch, self.accumulation = truth.fixed_batch(
                *configuration, self.batch, alone=False
            )
            return
        if not self.adaptive_batch or application.micro_batches > 1:
            split = truth.fixed_batch(*configuration, application.batch)
            self.micro_batch, self.accumulation = split
            return
        splitter = self._batch_splitter()
        if splitter is None or self.noise is None:
            self.micro_batch, self.accumulation = truth.first_batch(*configuration)
        else:
            split = truth.capped(*configuration, *splitter.best(self.noise))
            self.micro_batch, self.accumulation = split

    def _batch_splitter(self) -> BatchSplitter | None:
        """Return the splitter for the present shape; None on a type where it never ran."""
        believed = self.believed
        key = (believed, self.gpu_type, self.shape)
        if self._tuning is not None and all(
            a is b for a, b in zip(key, self._tuning[0], strict=True)
        ):
            return self._tuning[1]
        observations = tuple(o for o in believed if o.gpu_type == self.gpu_type)
        if not observations:
            return None
        splitter = BatchSplitter(
            self.described.application,
            observations,
            nodes=len(self.shape),
            gpus=sum(self.shape),
            max_batch=self.truth.largest,
            most=self.truth.most(self.gpu_type, self.shape),
            compat=self.compat,
            residuals=self.residuals,
        )
        self._tuning = (key, splitter)
        return splitter
