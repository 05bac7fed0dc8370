"""One simulated job: its training as time passes, and what is learned of it meanwhile.

After `Job.step` and `update_local_bsz` of Sia's artifact (SOSP'23): a change of GPU type or shape
costs the job its restart; then it makes progress epoch by epoch, each rounded
to whole seconds, and chooses its batch anew at every epoch's and every interval's end. Nodes do
not matter, only how many GPUs it has on each: changing places in the same shape is free.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from slurm_elastic.core.application import JobClass, Learned, Noise, Observation
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.simulator.applications import DescribedApplication
from slurm_elastic.simulator.batch_split import BatchSplitter
from slurm_elastic.simulator.truth.frozen_layers import FrozenLayers
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads.application_profiles import Shape, smallest_rotation
from slurm_elastic.simulator.workloads.workload import SubmittedJob

#: Shorter waits are rounding errors.
_INSTANT_S = 1e-6


class SimulatedJob:
    """Mutable; times are seconds since the workload's beginning.

    Attributes:
        tunes: its batch is chosen for goodput; else it is the user's.
        compat: it fits its model as the artifact does, which its batches then follow.
        restart_s: what each restart of it takes; `restart_left_s` of the present one.
        allocation: what it holds; None: it waits.
        shape: GPUs on each of its nodes, in the smallest rotation.
        micro_batch, accumulation: how its batch is split now.
        epoch, progress: how far it is.
        starts: how often it was given GPUs of another type or in another shape.
        start_s, completion_s: first start and end; None before.
        gpu_s, lost_gpu_s: GPU seconds held, and of them spent restarting.
        layers: its front layers that freeze; None: none ever do.
        extra_s: what each of its steps takes longer for crossing racks (rack_network.py), and
            `crossing_gpu_s` what that has cost.
        racks: it is in; 0: where there are none, or while it waits.
        places: (step with `extra_s`, without synchronisation) by (type, nodes, GPUs, micro-batch,
            racks), as first measured; {} where there are no racks.
        batch: ordered by the policy; None: its own choice.
    """

    __slots__ = (
        "_learned",
        "_seen",
        "_tuning",
        "accumulation",
        "allocation",
        "batch",
        "changed_s",
        "compat",
        "completion_s",
        "crossing_gpu_s",
        "described",
        "epoch",
        "extra_s",
        "gpu_s",
        "gpu_type",
        "job_id",
        "layers",
        "lost_gpu_s",
        "micro_batch",
        "noise",
        "now_s",
        "observations",
        "physics",
        "places",
        "progress",
        "racks",
        "restart_left_s",
        "restart_s",
        "shape",
        "start_s",
        "starts",
        "submitted",
        "tunes",
    )

    def __init__(
        self,
        submitted: SubmittedJob,
        physics: GroundTruth,
        described: DescribedApplication,
        *,
        job_id: int,
        restart_s: float,
        compat: bool = False,
        tunes: bool = True,
        layers: FrozenLayers | None = None,
    ) -> None:
        self.submitted = submitted
        self.physics = physics
        self.described = described
        self.job_id = job_id
        self.restart_s = restart_s
        self.compat = compat
        self.layers = layers
        self.tunes = tunes and described.application.job_class is JobClass.ADAPTIVE
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
        self.start_s: float | None = None
        self.changed_s: float | None = None
        self.completion_s: float | None = None
        self.gpu_s = 0.0
        self.lost_gpu_s = 0.0
        self.extra_s = 0.0
        self.racks = 0
        self.places: Mapping[tuple[str, int, int, int, int], tuple[float, float]] = {}
        self.crossing_gpu_s = 0.0
        self.now_s = submitted.time_s
        self.observations: tuple[Observation, ...] = ()
        self.noise: Noise | None = None
        self._seen: frozenset[tuple[str, int, int, int]] = frozenset()
        self._learned: Learned | None = None
        #: What it was made from, and the tuning.
        self._tuning: tuple[tuple[object, ...], BatchSplitter] | None = None

    @property
    def restarts(self) -> int:
        """Restarts after the first start."""
        return max(0, self.starts - 1)

    @property
    def gpus(self) -> int:
        """GPUs held."""
        return sum(self.shape)

    @property
    def learned(self) -> Learned:
        """What is known of it; the same object until something new is."""
        if self._learned is None:
            self._learned = Learned(
                self.described.application,
                self.observations,
                self.noise,
                self.layers.prefixes if self.layers else None,
            )
        return self._learned

    def inherit(self, observations: tuple[Observation, ...], noise: Noise | None) -> None:
        """Begin with what earlier jobs of the application measured."""
        self.observations, self.noise = observations, noise
        self._seen = frozenset((o.gpu_type, o.nodes, o.gpus, o.micro_batch) for o in observations)
        self._learned = None

    def copy(self) -> SimulatedJob:
        """An independent copy; what is shared is immutable or a cache."""
        found = copy.copy(self)
        found.layers = copy.copy(self.layers)
        return found

    def advance(self, until_s: float) -> None:
        """Let time pass; it stops at the job's completion.

        Raises:
            ProfileError: the tables do not say how fast it is where it was put.
        """
        seconds = until_s - self.now_s
        if not self.shape or self.completion_s is not None:
            self.now_s = until_s
            return
        gpus, physics = self.gpus, self.physics
        delay = min(self.restart_left_s, seconds)
        if delay:
            self.restart_left_s -= delay
            if self.restart_left_s < _INSTANT_S:
                self.restart_left_s = 0.0
            self.gpu_s += delay * gpus
            self.lost_gpu_s += delay * gpus
            self.now_s += delay
            seconds -= delay
        while seconds > 0:
            if self.layers is not None and self.layers.certify(self.progress / physics.total):
                self._freeze()
            rate = physics.goodput(
                self.gpu_type, self.shape, self.micro_batch, self.accumulation, self.epoch
            )
            slowed = self._slowed()
            rate *= slowed
            if self.layers is not None:
                rate *= self.layers.gain(*self._iteration(), accumulation=self.accumulation)
            before_s, before = seconds, self.progress
            self._observe()
            target = physics.targets[self.epoch]
            if self.progress + rate * seconds < target:
                self.progress += rate * seconds
                self._pass(seconds, gpus)
                seconds = 0.0
            else:
                # Epochs last whole seconds, as in the artifact.
                delta = min(float(round((target - self.progress) / rate)), seconds)
                self.progress = target
                self.epoch += 1
                self._pass(delta, gpus)
                seconds -= delta
            if self.layers is not None:
                self.layers.passed(before_s - seconds, self.progress - before)
            self.crossing_gpu_s += (before_s - seconds) * gpus * (1 - slowed)
            if self.epoch == len(physics.targets):
                self.completion_s = self.now_s
                return
            self._choose_batch()
        self.now_s = until_s

    def hold(self, allocation: Allocation | None, *, moving_costs: bool = False) -> None:
        """Give it other GPUs, or none.

        Args:
            allocation: the GPUs.
            moving_costs: a move to other nodes in the same shape is a restart, too; else it is
                free, as in Sia's artifact. Who is restarting anyway pays nothing more.
        """
        before, self.allocation = self.allocation, allocation
        if allocation is None:
            self.gpu_type, self.shape = "", ()
            self.restart_left_s = 0.0
            return
        shape = smallest_rotation(g for _, g in allocation.shares)
        moves = moving_costs and self.restart_left_s <= 0 and before != allocation
        if (allocation.gpu_type, shape) == (self.gpu_type, self.shape) and not moves:
            return
        self.gpu_type, self.shape = allocation.gpu_type, shape
        self.starts += 1
        self.changed_s = self.now_s
        self.start_s = self.now_s if self.start_s is None else self.start_s
        self.restart_left_s = self.restart_s
        self._choose_batch()
        self._freeze()

    def _freeze(self) -> None:
        """Freeze what it is to where it is, and let others know what it may."""
        if self.layers is None:
            return
        before = self.layers.prefixes
        self.layers.freeze(
            self.learned, gpu_type=self.gpu_type, nodes=len(self.shape), gpus=self.gpus
        )
        if self.layers.prefixes != before or self.learned.prefixes != before:
            self._learned = None

    def _iteration(self) -> tuple[float, float]:
        """As `GroundTruth.iteration`, of where it is, with nothing frozen."""
        return self.physics.iteration(self.gpu_type, self.shape, self.micro_batch)

    def order(self, batch: int | None) -> None:
        """Let it run with a global batch from now on, without a restart; None: as before."""
        if batch is None or batch == self.batch:
            return
        self.batch = batch
        if self.shape:
            self._choose_batch()

    def _slowed(self) -> float:
        """The part of its speed that crossing racks leaves it."""
        if not self.extra_s:
            return 1.0
        step, micro = self._iteration()
        if self.layers is not None:
            step, micro = self.layers.times(step, micro)
        whole = step + self.accumulation * micro
        return whole / (whole + self.extra_s)

    def _pass(self, seconds: float, gpus: int) -> None:
        self.now_s += seconds
        self.gpu_s += seconds * gpus

    def _observe(self) -> None:
        """Measure the present configuration; of equal ones the first counts."""
        key = (self.gpu_type, len(self.shape), self.gpus, self.micro_batch)
        if key not in self._seen:
            self._seen |= {key}
            seen = Observation(*key, *self._iteration())
            if self.layers is not None:
                seen = self.layers.observed(seen)
            self.observations = (*self.observations, seen)
            self._learned = None
        place = (*key, self.racks)
        if self.racks and place not in self.places:
            step, micro = self.physics.iteration(self.gpu_type, self.shape, self.micro_batch)
            self.places = {**self.places, place: (step + self.extra_s, micro)}
        batch = self.physics.batch(self.gpu_type, self.shape, self.micro_batch, self.accumulation)
        noise = self.physics.noise(batch, self.epoch)
        if noise is not self.noise:
            self.noise = noise
            self._learned = None

    def _choose_batch(self) -> None:
        """The batch with the best goodput by its own model; a fixed one if it is not elastic."""
        application, physics = self.described.application, self.physics
        where = self.gpu_type, self.shape
        if self.batch is not None and self.tunes and application.micro_batches == 1:
            self.micro_batch, self.accumulation = physics.fixed_batch(
                *where, self.batch, alone=False
            )
            return
        if not self.tunes or application.micro_batches > 1:
            self.micro_batch, self.accumulation = physics.fixed_batch(*where, application.batch)
            return
        tuning = self._tuned()
        if tuning is None or self.noise is None:
            self.micro_batch, self.accumulation = physics.first_batch(*where)
        else:
            self.micro_batch, self.accumulation = physics.capped(*where, *tuning.best(self.noise))

    def _tuned(self) -> BatchSplitter | None:
        """What its batch is chosen with; None on a type where it never ran."""
        asked = (self.observations, self.gpu_type, self.shape)
        if self._tuning is not None and all(
            a is b for a, b in zip(asked, self._tuning[0], strict=True)
        ):
            return self._tuning[1]
        seen = tuple(o for o in self.observations if o.gpu_type == self.gpu_type)
        if not seen:
            return None
        found = BatchSplitter(
            self.described.application,
            seen,
            nodes=len(self.shape),
            gpus=self.gpus,
            max_batch=self.physics.largest,
            most=self.physics.most(self.gpu_type, self.shape),
            compat=self.compat,
        )
        self._tuning = (asked, found)
        return found
