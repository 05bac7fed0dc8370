"""Freezing of front layers that have converged, and thawing of all layers.

Off unless the directive says `freeze=auto`, or, where no directive is known, the script. Rank 0
decides: the all-reduce of the next step carries its request, which all ranks then apply.

A prefix of n layers is *certified* when the criterion has reported it as converged in `passes`
checks in a row, the cap of the epoch allows it, and its penalty (`models.frozen_penalty`) is at
most `max_penalty`, all after the bootstrap period. A certified prefix is frozen, unless
`TrainingJob.freeze` chose fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.core.directive_grammar import DEFAULT_MAX_PENALTY
from slurm_elastic.models.frozen_penalty import Descent, cap, compound
from slurm_elastic.training.env_directive import read_directive
from slurm_elastic.training.freezing.criteria import (
    Criterion,
    CriterionInputs,
    GradientChange,
    GradientNorm,
    Plasticity,
)
from slurm_elastic.training.freezing.front_layers import FrontLayers
from slurm_elastic.training.freezing.guards import CriticalPeriod, ThawGuard, batch_changed
from slurm_elastic.training.freezing.overhead_budget import OverheadBudget
from slurm_elastic.training.freezing.plasticity import PlasticityMeter
from slurm_elastic.training.measure.gradient_noise import dot, room_for

#: Checks in a whole training, if it is long enough, and most steps between two of them, unless they
#: cost too much. With half as many the CNN's first layer froze near the end only.
_CHECKS = 250
_MOST_STEPS = 50
#: Checks in each of the windows that the bootstrap period compares.
_BOOTSTRAP_CHECKS = 5
#: Parts into which a training of fewer epochs is divided; the cap counts them as epochs.
_LEAST_EPOCHS = 10

_CRITERIA: Mapping[str, Callable[[], Criterion]] = {
    "plasticity": Plasticity,
    "gradient-change": GradientChange,
    "gradient-norm": GradientNorm,
}


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """Settings of freezing.

    Attributes:
        criterion: "plasticity", "gradient-change", "gradient-norm", or an own `Criterion`.
        max_penalty: fraction of the descent that freezing may cost, 0 to 1; that of a directive
            takes precedence.
        every: steps between two checks; None: a 250th of the training, at most 50; in trainings of
            which that is less than a 500th, more where checks would take over 1 % of the time.
        begin: fraction of the training before which nothing freezes.
        end: fraction after which nothing more freezes.
        settled: relative change of the training loss that ends the bootstrap period.
        passes: checks in a row that a prefix must pass.
        alpha: fraction of the layers still training that may freeze in an epoch.
        worse: relative rise of the validation loss above its best that thaws.
    """

    criterion: str | Criterion = "plasticity"
    max_penalty: float = DEFAULT_MAX_PENALTY
    every: int | None = None
    begin: float = 0.1
    end: float = 0.95
    settled: float = 0.1
    passes: int = 2
    alpha: float = 1 / 3
    worse: float = 0.02

    def __post_init__(self) -> None:
        if isinstance(self.criterion, str) and self.criterion not in _CRITERIA:
            names = ", ".join(_CRITERIA)
            raise ValueError(
                f"Freezing: criterion {self.criterion!r} is invalid: expected one of {names}, or an"
                " object"
            )
        for name in ("max_penalty", "begin", "end", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                value = getattr(self, name)
                raise ValueError(f"Freezing: {name} {value} is invalid: expected 0 to 1")
        for name in ("every", "passes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"Freezing: {name} {value} is invalid: expected at least 1")


def freezing_settings(
    freeze: str | Freezing, environment: Mapping[str, str] | None = None
) -> tuple[Freezing | None, str]:
    """Return the settings of freezing in force, from the directive and the script.

    Args:
        freeze: of the script: "off", "auto" or settings.
        environment: variables; None: those of this process.

    Returns:
        The settings, None: no freezing; and a line for the log, or "".

    Raises:
        ValueError: a word that is neither off nor auto, or an invalid directive.
    """
    if isinstance(freeze, str) and freeze not in ("off", "auto"):
        raise ValueError(f"freeze: {freeze!r} is invalid: expected 'off', 'auto' or Freezing(...)")
    settings = Freezing() if isinstance(freeze, str) else freeze
    directive = read_directive(environment)
    if directive is None:
        return (None if freeze == "off" else settings), ""
    if directive.freeze != "auto":
        ignored = f"no freezing: --elastic={directive} does not say freeze=auto"
        return None, "" if freeze == "off" else ignored
    values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    return Freezing(**(values | {"max_penalty": directive.max_penalty})), ""


class Freezer:
    """Freezing of a model's front layers: decided on rank 0, applied on all ranks.

    Args:
        model: already restored; no layer of it is frozen yet.
        settings: criterion and thresholds.
        optimizer: its learning rates may be a reason to thaw.
        steps, epochs: of the whole training.
        global_batch: samples per step.
        is_leader: whether this is rank 0.
        observes: whether the whole model trains here; else the certified prefix stays as it is.
        log: takes one line for the job's log.

    Attributes:
        prefix: the layers.
        certified: number of layers that may be frozen.
        chosen: number of these that the script wants frozen; None: all.
        ordered: the same by the controller; the smaller one applies.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Freezing,
        *,
        optimizer: torch.optim.Optimizer,
        steps: int,
        epochs: int,
        global_batch: int,
        is_leader: bool,
        observes: bool = True,
        log: Callable[[str], None],
    ) -> None:
        self.prefix = FrontLayers(model)
        self.certified = 0
        self.chosen: int | None = None
        self.ordered: int | None = None
        self._settings = settings
        self._optimizer = optimizer
        self._epochs = epochs
        self._global_batch = global_batch
        self._is_leader = is_leader
        self._observes = is_leader and observes
        self._log = log
        every = settings.every or max(1, min(_MOST_STEPS, steps // _CHECKS))
        self._budget = OverheadBudget(
            every, most=1 if settings.every else steps // (_CHECKS * every)
        )
        self._criterion = (
            _CRITERIA[settings.criterion]()
            if isinstance(settings.criterion, str)
            else settings.criterion
        )
        self._bootstrap = CriticalPeriod(window=_BOOTSTRAP_CHECKS * every, settled=settings.settled)
        self._thaw_guard = ThawGuard(worse=settings.worse)
        self._meter = PlasticityMeter()
        self._answers: list[int] = []
        self._penalties = [0.0]
        self._last_gradients: list[list[torch.Tensor]] | None = None
        self._descent = self._new_descent()

    @property
    def frozen(self) -> int:
        """Number of layers that do not train now."""
        return self.prefix.frozen

    @property
    def penalties(self) -> tuple[float, ...]:
        """Penalties of freezing 0, 1, ... `certified` layers; on rank 0 only."""
        return tuple(self._penalties)

    @property
    def requested(self) -> int:
        """Number of layers that rank 0 requests to freeze after this step; 0 on other ranks."""
        if not self._is_leader:
            return 0
        limits = [n for n in (self.chosen, self.ordered) if n is not None]
        return min([self.certified, *limits])

    def begin(self, step: int) -> None:
        """Prepare for a step, counted from 1."""
        self.prefix.hold()
        if self._check_due(step) and self._criterion.plastic and self._bootstrap.over:
            self._meter.record_next_input(self.prefix.layers[self.frozen].modules[0])

    def observe(self, step: int, loss: float, *, epoch: int, progress: float) -> None:
        """Observe a step whose gradients are reduced: means over the whole batch, not clipped yet.

        Args:
            step: counted from 1.
            loss: its mean.
            epoch: epochs done after it.
            progress: of the whole training after it.
        """
        if not self._observes or len(self.prefix.layers) < 2:
            return
        reason = self._thaw_guard.check_rates(
            [float(group["lr"]) for group in self._optimizer.param_groups]
        )
        if reason:
            self._reset(reason)
        self._bootstrap.observe(loss)
        if not self._bootstrap.over:
            return
        with self._budget.timed():
            self._measure_descent()
            if not self._check_due(step):
                return
            self._check(epoch=epoch, progress=progress)
        self._budget.finish_check(step)

    def validated(self, loss: float) -> None:
        """Observe the loss on samples that are not trained on."""
        if self._is_leader and (reason := self._thaw_guard.check_validation(loss)):
            self._reset(reason)

    def set_batch(self, batch: int) -> None:
        """Set the samples of a step over all ranks; a large change thaws all layers."""
        if self.certified and not batch_changed(self._global_batch, batch):
            return  # small changes add up
        if self._is_leader and self.certified:
            self._reset(f"the batch was {self._global_batch}, now it is {batch}")
        self._global_batch = batch

    def apply(self, frozen: int) -> bool:
        """Freeze as agreed, between two steps; return whether anything changed."""
        frozen_before = self.frozen
        if frozen == frozen_before:
            return False
        self.prefix.set(frozen)
        self._meter.reset()
        self._last_gradients, self._answers = None, []
        self._descent = self._new_descent()
        if self._is_leader:
            if frozen_before == 0:
                self._thaw_guard.frozen()
            elif frozen == 0:
                self._thaw_guard.thawed()
            self._log_frozen(frozen_before)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint's manifest: numbers, text and lists of them."""
        return {
            "layers": list(self.prefix.names),
            "frozen": self.frozen,
            "certified": self.certified,
            "penalties": self._penalties,
            "answers": self._answers,
            "global_batch": self._global_batch,
            "bootstrap": self._bootstrap.state_dict(),
            "thaw": self._thaw_guard.state_dict(),
            "descent": self._descent.state_dict(),
            "criterion": [type(self._criterion).__name__, self._criterion.state_dict()],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state from a checkpoint, the same on all ranks."""
        if not state:
            return
        if list(state["layers"]) != list(self.prefix.names):
            self._log_if_leader("the checkpoint has other layers: none is frozen")
            return
        if batch_changed(state["global_batch"], self._global_batch):
            self._log_if_leader(
                f"the batch was {state['global_batch']}, now it is {self._global_batch}:"
                " all layers train again"
            )
            return
        self.prefix.set(state["frozen"])
        self.certified, self._penalties = state["certified"], list(state["penalties"])
        self._answers = list(state["answers"])
        self._bootstrap.load_state_dict(state["bootstrap"])
        self._thaw_guard.load_state_dict(state["thaw"])
        self._descent = self._new_descent()
        self._descent.load_state_dict(state["descent"])
        name, inner = state["criterion"]
        if name == type(self._criterion).__name__:
            self._criterion.load_state_dict(inner)
        if self.frozen:
            self._log_frozen(0)

    def report_fields(self) -> dict[str, Any]:
        """Return the fields of a report that are about freezing."""
        return {
            "layers": len(self.prefix.layers),
            "frozen": self.frozen,
            "certified": self.certified,
            # Between a reason to thaw and the thaw itself, layers are frozen but not certified.
            "penalty": self._penalties[min(self.frozen, self.certified)],
            "certified_penalty": self._penalties[-1],
        }

    def _check(self, *, epoch: int, progress: float) -> None:
        gradients = self.prefix.gradients()
        plasticity = self._meter.read() if self._criterion.plastic else None
        rounds = epoch if self._epochs >= _LEAST_EPOCHS else int(progress * _LEAST_EPOCHS)
        converged = self._criterion.see(
            CriterionInputs(
                layers=len(self.prefix.layers),
                frozen=self.frozen,
                epoch=rounds,
                progress=progress,
                gradients=gradients,
                plasticity=plasticity,
            )
        )
        self._answers = [*self._answers, converged][-self._settings.passes :]
        within = self._settings.begin <= progress <= self._settings.end
        most = cap(len(self.prefix.layers), rounds, alpha=self._settings.alpha)
        reach = min(*self._answers, most) if len(self._answers) == self._settings.passes else 0
        if within and reach > self.certified and not self._thaw_guard.regressed:
            self._certify(reach)
            # The penalty is measured only while all other conditions hold.
            if room_for([g for layer in gradients for g in layer]):
                self._last_gradients = [[g.clone() for g in layer] for layer in gradients]
        else:
            self._descent = self._new_descent()

    def _certify(self, n: int) -> None:
        """Find the longest prefix of at most `n` layers within the penalty."""
        base = self._penalties[self.frozen]
        penalties = {
            k: compound(base, self._descent.penalty(k - self.frozen))
            for k in range(self.certified + 1, n + 1)
        }
        while penalties and max(penalties.values()) > self._settings.max_penalty:
            penalties.popitem()
        self._penalties += penalties.values()
        self.certified += len(penalties)

    def _measure_descent(self) -> None:
        """Multiply this step's gradients with those of the step before, layer by layer."""
        former, self._last_gradients = self._last_gradients, None
        if former is None:
            return
        gradients = self.prefix.gradients()
        if [len(layer) for layer in former] == [len(layer) for layer in gradients]:
            self._descent.add([float(dot(*pair)) for pair in zip(former, gradients, strict=True)])

    def _reset(self, reason: str) -> None:
        """Discard all measurements: all layers train, from the bootstrap period on."""
        if self.certified:
            self._log_if_leader(f"all layers train again: {reason}")
            self._criterion.thawed()
        self._thaw_guard.thawed()
        self.certified, self._penalties, self._answers = 0, [0.0], []
        self._last_gradients = None
        self._descent = self._new_descent()
        self._bootstrap.reset()
        self._meter.reset()

    def _new_descent(self) -> Descent:
        return Descent(max(1, len(self.prefix.layers) - self.frozen))

    def _check_due(self, step: int) -> bool:
        return self._observes and len(self.prefix.layers) > 1 and self._budget.due(step)

    def _log_frozen(self, frozen_before: int) -> None:
        count = len(self.prefix.layers)
        if self.frozen:
            penalty = self._penalties[min(self.frozen, self.certified)]
            word = "frozen" if self.frozen > frozen_before else "still frozen"
            last = self.prefix.names[self.frozen - 1]
            self._log_if_leader(
                f"{self.frozen} of {count} layers {word}, up to {last} (penalty {penalty:.2%})"
            )

    def _log_if_leader(self, text: str) -> None:
        if self._is_leader:
            self._log(text)
