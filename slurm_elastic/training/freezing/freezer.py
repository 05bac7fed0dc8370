"""Freezes the front layers of a model once they have converged, and thaws them if need be.

Off unless the directive says `freeze=auto`, or, where no directive is known, the script. Rank 0
decides: what it wants rides in the all-reduce of the next step, after which all ranks do it.

A prefix of n layers is *certified* when the criterion has held it for converged in `passes`
looks in a row, the cap of the epoch allows it, and its penalty (`models.freezing`) is at most
`max_penalty`, all after the bootstrap period. What is certified is applied, unless
`Job.freeze` chose fewer layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.core.directive import DEFAULT_MAX_PENALTY
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

#: Looks in a whole training, if it is long enough, and most steps between two of them, unless they
#: cost too much. With half as many looks the CNN's first layer froze near the end only.
_LOOKS = 250
_MOST_STEPS = 50
#: Looks in each of the windows that the bootstrap period compares.
_BOOTSTRAP_LOOKS = 5
#: A training of fewer epochs is divided into so many parts, which the cap counts as epochs.
_LEAST_EPOCHS = 10

_CRITERIA: Mapping[str, Callable[[], Criterion]] = {
    "plasticity": Plasticity,
    "gradient-change": GradientChange,
    "gradient-norm": GradientNorm,
}


@dataclass(frozen=True, kw_only=True)
class Freezing:
    """How layers are frozen.

    Attributes:
        criterion: "plasticity", "gradient-change", "gradient-norm", or one of your own.
        max_penalty: fraction of the descent that freezing may cost, 0 to 1; that of a directive
            goes before it.
        every: steps between two looks; None: a 250th of the training, at most 50; in trainings of
            which that is less than a 500th, more where looks would take over 1 % of the time.
        begin: fraction of the training before which nothing freezes.
        end: fraction after which nothing more freezes.
        settled: relative change of the training loss that ends the bootstrap period.
        passes: looks in a row that a prefix must pass.
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
            known = ", ".join(_CRITERIA)
            raise ValueError(f"freezing: criterion {self.criterion!r} is unknown; known: {known}")
        for name in ("max_penalty", "begin", "end", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"freezing: {name} is {getattr(self, name)}; give 0 to 1")
        for name in ("every", "passes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"freezing: {name} is {value}; it must be at least 1")


def freezing_settings(
    asked: str | Freezing, environment: Mapping[str, str] | None = None
) -> tuple[Freezing | None, str]:
    """What the directive and the script make of freezing.

    Args:
        asked: by the script: "off", "auto" or how.
        environment: the process's by default.

    Returns:
        How to freeze, None: not at all; and a line for the log, or "".

    Raises:
        ValueError: a word that is neither off nor auto, or a damaged directive.
    """
    if isinstance(asked, str) and asked not in ("off", "auto"):
        raise ValueError(f"freeze is {asked!r}; write off, auto or Freezing(...)")
    how = Freezing() if isinstance(asked, str) else asked
    directive = read_directive(environment)
    if directive is None:
        return (None if asked == "off" else how), ""
    if directive.freeze != "auto":
        ignored = f"no freezing: --elastic={directive} does not say freeze=auto"
        return None, "" if asked == "off" else ignored
    values = {name: getattr(how, name) for name in how.__dataclass_fields__}
    return Freezing(**(values | {"max_penalty": directive.max_penalty})), ""


class Freezer:
    """Decides, on rank 0, and does what was decided, on all ranks.

    Args:
        model: already restored; before any layer of it is frozen.
        how: criterion and thresholds.
        optimizer: whose learning rates are watched.
        steps, epochs: of the whole training.
        global_batch: samples per step.
        is_leader: whether this is rank 0.
        watches: whether the whole model trains here; else what is certified stays as it is.
        log: takes one line for the job's log.

    Attributes:
        prefix: the layers.
        certified: how many of them may be frozen.
        chosen: how many are to be, by the script, if not all of those; None: all.
        ordered: the same by the controller; the smaller of both counts.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        how: Freezing,
        *,
        optimizer: torch.optim.Optimizer,
        steps: int,
        epochs: int,
        global_batch: int,
        is_leader: bool,
        watches: bool = True,
        log: Callable[[str], None],
    ) -> None:
        self.prefix = FrontLayers(model)
        self.certified = 0
        self.chosen: int | None = None
        self.ordered: int | None = None
        self._how = how
        self._optimizer = optimizer
        self._epochs = epochs
        self._global_batch = global_batch
        self._is_leader = is_leader
        self._watches = is_leader and watches
        self._log = log
        every = how.every or max(1, min(_MOST_STEPS, steps // _LOOKS))
        self._budget = OverheadBudget(every, most=1 if how.every else steps // (_LOOKS * every))
        self._criterion = (
            _CRITERIA[how.criterion]() if isinstance(how.criterion, str) else how.criterion
        )
        self._bootstrap = CriticalPeriod(window=_BOOTSTRAP_LOOKS * every, settled=how.settled)
        self._thaw = ThawGuard(worse=how.worse)
        self._meter = PlasticityMeter()
        self._answers: list[int] = []
        self._penalties = [0.0]
        self._kept: list[list[torch.Tensor]] | None = None
        self._descent = self._fresh()

    @property
    def frozen(self) -> int:
        """Layers that do not train now."""
        return self.prefix.frozen

    @property
    def penalties(self) -> tuple[float, ...]:
        """Of freezing 0, 1, ... `certified` layers; known to rank 0."""
        return tuple(self._penalties)

    @property
    def requested(self) -> int:
        """How many layers rank 0 wants to be frozen after the present step; 0 elsewhere."""
        if not self._is_leader:
            return 0
        asked = [n for n in (self.chosen, self.ordered) if n is not None]
        return min([self.certified, *asked])

    def begin(self, step: int) -> None:
        """A step begins, counted from 1."""
        self.prefix.hold()
        if self._looks(step) and self._criterion.plastic and self._bootstrap.over:
            self._meter.watch(self.prefix.layers[self.frozen].modules[0])

    def see(self, step: int, loss: float, *, epoch: int, progress: float) -> None:
        """The gradients of a step are reduced: means over the whole batch, not clipped yet.

        Args:
            step: counted from 1.
            loss: its mean.
            epoch: epochs done after it.
            progress: of the whole training after it.
        """
        if not self._watches or len(self.prefix.layers) < 2:
            return
        why = self._thaw.rates([float(group["lr"]) for group in self._optimizer.param_groups])
        if why:
            self._void(why)
        self._bootstrap.see(loss)
        if not self._bootstrap.over:
            return
        with self._budget.paying():
            self._compare()
            if not self._looks(step):
                return
            self._look(epoch=epoch, progress=progress)
        self._budget.looked(step)

    def validated(self, loss: float) -> None:
        """The script measured the loss on samples that it does not train on."""
        if self._is_leader and (why := self._thaw.validated(loss)):
            self._void(why)

    def set_batch(self, batch: int) -> None:
        """A step takes so many samples from now on, over all ranks."""
        if self.certified and not batch_changed(self._global_batch, batch):
            return  # several small changes are judged together
        if self._is_leader and self.certified:
            self._void(f"the batch was {self._global_batch}, now it is {batch}")
        self._global_batch = batch

    def apply(self, frozen: int) -> bool:
        """Freeze as agreed, between two steps; whether anything changed."""
        before = self.frozen
        if frozen == before:
            return False
        self.prefix.set(frozen)
        self._meter.forget()
        self._kept, self._answers = None, []
        self._descent = self._fresh()
        if self._is_leader:
            if before == 0:
                self._thaw.frozen()
            elif frozen == 0:
                self._thaw.thawed()
            self._tell(before)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint's manifest keeps: numbers, text and lists of them."""
        return {
            "layers": list(self.prefix.names),
            "frozen": self.frozen,
            "certified": self.certified,
            "penalties": self._penalties,
            "answers": self._answers,
            "global_batch": self._global_batch,
            "bootstrap": self._bootstrap.state_dict(),
            "thaw": self._thaw.state_dict(),
            "descent": self._descent.state_dict(),
            "criterion": [type(self._criterion).__name__, self._criterion.state_dict()],
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Take up what a checkpoint says; all ranks read the same one."""
        if not state:
            return
        if list(state["layers"]) != list(self.prefix.names):
            self._log_if_leader("the checkpoint's layers are others: none is frozen")
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
        self._thaw.load_state_dict(state["thaw"])
        self._descent = self._fresh()
        self._descent.load_state_dict(state["descent"])
        name, inner = state["criterion"]
        if name == type(self._criterion).__name__:
            self._criterion.load_state_dict(inner)
        if self.frozen:
            self._tell(0)

    def report_fields(self) -> dict[str, Any]:
        """The fields of a report that are about freezing."""
        return {
            "layers": len(self.prefix.layers),
            "frozen": self.frozen,
            "certified": self.certified,
            # Between a reason to thaw and the thaw itself, layers are frozen but not certified.
            "penalty": self._penalties[min(self.frozen, self.certified)],
            "certified_penalty": self._penalties[-1],
        }

    def _look(self, *, epoch: int, progress: float) -> None:
        gradients = self.prefix.gradients()
        plasticity = self._meter.read() if self._criterion.plastic else None
        rounds = epoch if self._epochs >= _LEAST_EPOCHS else int(progress * _LEAST_EPOCHS)
        answer = self._criterion.see(
            CriterionInputs(
                layers=len(self.prefix.layers),
                frozen=self.frozen,
                epoch=rounds,
                progress=progress,
                gradients=gradients,
                plasticity=plasticity,
            )
        )
        self._answers = [*self._answers, answer][-self._how.passes :]
        within = self._how.begin <= progress <= self._how.end
        most = cap(len(self.prefix.layers), rounds, alpha=self._how.alpha)
        reach = min(*self._answers, most) if len(self._answers) == self._how.passes else 0
        if within and reach > self.certified and not self._thaw.regressed:
            self._certify(reach)
            # The penalty is only looked after while it is all that stands in the way.
            if room_for([g for layer in gradients for g in layer]):
                self._kept = [[g.clone() for g in layer] for layer in gradients]
        else:
            self._descent = self._fresh()

    def _certify(self, n: int) -> None:
        """Find the longest prefix of at most `n` layers within the penalty."""
        base = self._penalties[self.frozen]
        found = {
            k: compound(base, self._descent.penalty(k - self.frozen))
            for k in range(self.certified + 1, n + 1)
        }
        while found and max(found.values()) > self._how.max_penalty:
            found.popitem()
        self._penalties += found.values()
        self.certified += len(found)

    def _compare(self) -> None:
        """The products of this step's gradients with those kept from the step before."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        gradients = self.prefix.gradients()
        if [len(layer) for layer in kept] == [len(layer) for layer in gradients]:
            self._descent.add([float(dot(*pair)) for pair in zip(kept, gradients, strict=True)])

    def _void(self, why: str) -> None:
        """What was learned no longer holds: all layers train, from the bootstrap period on."""
        if self.certified:
            self._log_if_leader(f"all layers train again: {why}")
            self._criterion.thawed()
        self._thaw.thawed()
        self.certified, self._penalties, self._answers = 0, [0.0], []
        self._kept = None
        self._descent = self._fresh()
        self._bootstrap.reset()
        self._meter.forget()

    def _fresh(self) -> Descent:
        return Descent(max(1, len(self.prefix.layers) - self.frozen))

    def _looks(self, step: int) -> bool:
        return self._watches and len(self.prefix.layers) > 1 and self._budget.due(step)

    def _tell(self, before: int) -> None:
        count = len(self.prefix.layers)
        if self.frozen:
            penalty = self._penalties[min(self.frozen, self.certified)]
            word = "frozen" if self.frozen > before else "still frozen"
            last = self.prefix.names[self.frozen - 1]
            self._log_if_leader(
                f"{self.frozen} of {count} layers {word}, up to {last} (penalty {penalty:.2%})"
            )

    def _log_if_leader(self, text: str) -> None:
        if self._is_leader:
            self._log(text)
