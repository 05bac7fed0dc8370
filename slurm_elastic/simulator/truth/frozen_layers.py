"""The front layers of one simulated job: which may be frozen, which are, and what that costs it.

The library's part (what is certified) follows freezing_truth.py; the order how many are to be
frozen follows the same functions as live: under a policy that predicts frozen layers
`models.effective_progress.prefix`, else `models.frozen_penalty.choose`, as many as `max-penalty`
allows.
"""

from __future__ import annotations

import dataclasses

from slurm_elastic.core.application import Learned, Observation, Prefixes
from slurm_elastic.models import effective_progress
from slurm_elastic.models.frozen_penalty import choose
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.simulator.truth.freezing_truth import MAX_PENALTY, FreezingTruth


class FrozenLayers:
    """Mutable; copied with its job.

    Args:
        truth: about the application.
        weighs: the number of layers is what gives the best effective progress; else all allowed.
        compat: the job's model follows Sia's artifact.

    Attributes:
        prefixes: what its reports say.
        lost: progress lost to freezing, in the unit of the job's progress.
        layer_s: layers frozen times seconds; `run_s` of how many.
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
        """Layers frozen now."""
        return self.prefixes.frozen

    @property
    def mean(self) -> float:
        """Mean fraction of the layers frozen while it trained."""
        return self.layer_s / self.run_s / self._truth.layers if self.run_s else 0.0

    def certify(self, done: float) -> bool:
        """Look at the layers when this fraction of the progress is made; whether it is news."""
        certified = self._truth.certified(done)
        if certified == self.prefixes.certified:
            return False
        frozen = min(self.frozen, certified)
        self._say(certified, frozen)
        return True

    def freeze(self, learned: Learned, *, gpu_type: str, nodes: int, gpus: int) -> None:
        """Freeze as many as it is to: what a report is answered with.

        Args:
            learned: of the job; what it says of layers does not count.
            gpu_type: held.
            nodes: held.
            gpus: held, over all nodes.
        """
        now = self.prefixes
        if self._weighs:
            learned = dataclasses.replace(learned, prefixes=now)
            model = GoodputModel.of(learned, compat=self._compat)
            frozen = effective_progress.prefix(
                model, learned, gpu_type=gpu_type, nodes=nodes, gpus=gpus
            )
        else:
            frozen = choose(now.certified, dict(now.penalties), max_penalty=MAX_PENALTY)
        if frozen != now.frozen:
            self._say(now.certified, frozen)

    def _say(self, certified: int, frozen: int) -> None:
        # As a report: penalties of what is frozen and of what is certified, no others.
        named = sorted({n for n in (frozen, certified) if n})
        self.prefixes = dataclasses.replace(
            self.prefixes,
            certified=certified,
            frozen=frozen,
            penalties=tuple((n, self._truth.penalty(n)) for n in named),
        )

    def times(self, step_s: float, micro_s: float) -> tuple[float, float]:
        """(step, micro-step) as it is now, of those with nothing frozen; seconds."""
        return self._truth.times(step_s, micro_s, self.frozen)

    def gain(self, step_s: float, micro_s: float, *, accumulation: int) -> float:
        """Progress per second over that with nothing frozen.

        Args:
            step_s: of a step with nothing frozen.
            micro_s: of an accumulated micro-step.
            accumulation: how many of these in an iteration.
        """
        if not self.frozen:
            return 1.0
        step, micro = self.times(step_s, micro_s)
        faster = (step_s + accumulation * micro_s) / (step + accumulation * micro)
        return faster * (1.0 - self._truth.lost(self.frozen))

    def observed(self, seen: Observation) -> Observation:
        """What is learned from a configuration, of its times with nothing frozen.

        They are measured as they are now, and corrected as the controller does.
        """
        if not self.frozen:
            return seen
        step, micro = self.times(seen.step_s, seen.micro_step_s)
        measured = dataclasses.replace(seen, step_s=step, micro_step_s=micro)
        return effective_progress.thawed(
            measured, effective_progress.part(self.prefixes, self.frozen)
        )

    def passed(self, seconds: float, progress: float) -> None:
        """Count what has happened: time, and progress made in it."""
        self.run_s += seconds
        self.layer_s += seconds * self.frozen
        lost = self._truth.lost(self.frozen)
        if 0 < lost < 1:
            self.lost += progress * lost / (1 - lost)
