"""Front layers of one simulated job: which may be frozen, which are frozen, and their effect.

The certified layers follow freezing_truth.py. The number to freeze comes from the same functions as
live: `models.effective_progress.prefix` under a policy that predicts frozen layers, else
`models.frozen_penalty.choose`, as many as `max-penalty` allows.
"""

from __future__ import annotations

import dataclasses

from slurm_elastic.core.application import Learned, Observation, Prefixes
from slurm_elastic.models import effective_progress
from slurm_elastic.models.frozen_penalty import choose
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.simulator.truth.freezing_truth import MAX_PENALTY, FreezingTruth


class FrozenLayers:
    """State of the layers of one job; mutable, copied with its job.

    Args:
        truth: truth about the application.
        weighs: freeze the number of layers with the best effective progress; else all allowed.
        compat: fit the job's model as Sia's artifact does.

    Attributes:
        prefixes: layers as the job reports them.
        lost: progress lost to freezing, in the unit of the job's progress.
        layer_s: sum of layers frozen times seconds.
        run_s: seconds trained.
    """

    def __init__(self, truth: FreezingTruth, *, weighs: bool, compat: bool) -> None:
        self._truth = truth
        self._weighs, self._compat = weighs, compat
        self.prefixes = Prefixes(
            layers=truth.layers, certified=0, max_penalty=MAX_PENALTY, costs=truth.costs
        )
        self.lost = self.layer_s = self.run_s = 0.0

    @property
    def frozen(self) -> int:
        """Number of layers frozen now."""
        return self.prefixes.frozen

    @property
    def mean(self) -> float:
        """Mean fraction of the layers that was frozen while it trained."""
        return self.layer_s / self.run_s / self._truth.layers if self.run_s else 0.0

    def certify(self, progress: float) -> bool:
        """Update the certified layers at this part of the progress; return whether they changed."""
        certified = self._truth.certified(progress)
        if certified == self.prefixes.certified:
            return False
        frozen = min(self.frozen, certified)
        self._report(certified, frozen)
        return True

    def freeze(self, observations: Learned, *, gpu_type: str, nodes: int, gpus: int) -> None:
        """Freeze as many layers as the controller orders in answer to a report.

        Args:
            observations: of the job; their layers are ignored.
            gpu_type: GPU type held.
            nodes: nodes held.
            gpus: GPUs held, over all nodes.
        """
        prefixes = self.prefixes
        if self._weighs:
            observations = dataclasses.replace(observations, prefixes=prefixes)
            model = GoodputModel.of(observations, compat=self._compat)
            frozen = effective_progress.prefix(
                model, observations, gpu_type=gpu_type, nodes=nodes, gpus=gpus
            )
        else:
            frozen = choose(prefixes.certified, dict(prefixes.penalties), max_penalty=MAX_PENALTY)
        if frozen != prefixes.frozen:
            self._report(prefixes.certified, frozen)

    def _report(self, certified: int, frozen: int) -> None:
        # As in a report: penalties of the frozen and of the certified prefix only.
        reported = sorted({n for n in (frozen, certified) if n})
        self.prefixes = dataclasses.replace(
            self.prefixes,
            certified=certified,
            frozen=frozen,
            penalties=tuple((n, self._truth.penalty(n)) for n in reported),
        )

    def times(self, step_s: float, micro_s: float) -> tuple[float, float]:
        """Return (step, micro-step) with the present layers frozen from those without; seconds."""
        return self._truth.times(step_s, micro_s, self.frozen)

    def gain(self, step_s: float, micro_s: float, *, accumulation: int) -> float:
        """Return the progress per second over that with nothing frozen.

        Args:
            step_s: seconds of a step with nothing frozen.
            micro_s: seconds of an accumulated micro-step.
            accumulation: accumulated micro-steps in an iteration.
        """
        if not self.frozen:
            return 1.0
        step, micro = self.times(step_s, micro_s)
        speedup = (step_s + accumulation * micro_s) / (step + accumulation * micro)
        return speedup * (1.0 - self._truth.lost(self.frozen))

    def observed(self, observation: Observation) -> Observation:
        """Return an observation with the present layers frozen from one without.

        The times are those with the present layers frozen, corrected as in the controller.
        """
        if not self.frozen:
            return observation
        step, micro = self.times(observation.step_s, observation.micro_step_s)
        frozen_observation = dataclasses.replace(observation, step_s=step, micro_step_s=micro)
        return effective_progress.thawed(
            frozen_observation, effective_progress.part(self.prefixes, self.frozen)
        )

    def passed(self, seconds: float, progress: float) -> None:
        """Add time, and the progress made in it."""
        self.run_s += seconds
        self.layer_s += seconds * self.frozen
        lost = self._truth.lost(self.frozen)
        if 0 < lost < 1:
            self.lost += progress * lost / (1 - lost)
