"""The global batch of a job and the learning rate that belongs to it.

With `batch=MIN-MAX` in the directive the controller may order another global batch; the
all-reduce of a step carries it from rank 0 to the others, and the next step has that size.
Without it the batch never changes. The learning rate that the script sets, and its schedule,
are those of the *initial* batch, `init(global_batch=...)`. With k = batch / initial batch a
step's rate is multiplied by

    sqrt      sqrt(k)                                  Krizhevsky, arXiv 1404.5997, section 5;
                                                       Malladi et al., NeurIPS'22, for Adam
    linear    k, reached within `WARM_UP` steps        Goyal et al., arXiv 1706.02677
    adascale  r = (var + sqr) / (var / k + sqr)        Johnson et al., ICML'20; r is between 1 and k
    constant  1

The factor applies during `optimizer.step()` only (`BatchSize.scaled`), so schedulers and
checkpoints hold the unscaled rate. The schedule is counted in steps at the initial batch: a step
of n samples advances it by n / initial batch, under `adascale` by r, as its authors do.

>>> size = BatchSize(32, limits=(32, 128), replicas=2)
>>> size.ordered = 500
>>> size.requested, size.apply(size.requested), size.now, size.factor(128)
(128, True, 128, 2.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from slurm_elastic.core.directive import Directive, DirectiveError

RULES = ("sqrt", "adascale", "linear", "constant")
#: Safe for Adam and SGD alike, and it needs no measurement.
DEFAULT_RULE = "sqrt"
#: Steps that `linear` takes to reach its factor after a rise of the batch.
WARM_UP = 200
#: Largest batch that a float32 carries to the other ranks exactly.
_LARGEST = 2**24


class Optimizer(Protocol):
    """The needed part of `torch.optim.Optimizer`."""

    param_groups: list[dict[str, Any]]


class Scheduler(Protocol):
    """The needed part of torch's learning-rate schedulers."""

    def step(self) -> Any:
        """Advance the schedule by one step at the initial batch."""


def limits(global_batch: int, directive: Directive | None) -> tuple[int, int]:
    """Return the smallest and the largest batch of a job; equal where it never changes.

    Args:
        global_batch: that of the script.
        directive: the one in force.
    """
    if directive is None or directive.batch is None:
        return global_batch, global_batch
    return directive.batch


class BatchSize:
    """The global batch of a job, as one rank holds it; only rank 0 has the controller's order.

    Args:
        initial: the script's; samples per step over all ranks.
        limits: smallest and largest allowed batch; the batch is the nearer one if `initial` is
            outside of them.
        rule: one of `RULES`.
        replicas: ranks (or pipelines) that share a step's samples.
        noise: returns `grad_sqr` and `grad_var` at the initial batch as in a report, or nothing;
            called on rank 0, for `adascale`.
        is_leader: whether this is rank 0.
        log: takes one line for the job's log.

    Attributes:
        initial, rule: as given.
        limits: those in force.
        now: samples of the next step.
        ordered: the controller's order, on rank 0; None: none.

    Raises:
        ValueError: an unknown rule, or a batch below 1.
    """

    def __init__(
        self,
        initial: int,
        *,
        limits: tuple[int, int],
        rule: str = DEFAULT_RULE,
        replicas: int = 1,
        noise: Callable[[], Mapping[str, float]] = dict,
        is_leader: bool = True,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"batch_rule: {rule!r} is invalid: expected one of {', '.join(RULES)}")
        if initial < 1:
            raise ValueError(f"global_batch: {initial} is invalid: expected at least 1")
        self.initial = initial
        self.limits = self._submitted = limits
        self._in_force = ""
        self.rule = rule
        self.ordered: int | None = None
        self.now = self._within(initial)
        self._replicas = replicas
        self._noise = noise
        self._is_leader = is_leader
        self._log = log
        #: Part of a schedule step that is not carried out yet: samples, or steps under `adascale`.
        self._rest: float = 0
        #: Factor at which the warm-up of `linear` began, and its steps done.
        full = self._full()
        self._ramp = (1.0, 0) if full > 1 else (full, WARM_UP)
        #: (grad_sqr, grad_var)
        self._last_noise: tuple[float, float] | None = None

    @property
    def may_change(self) -> bool:
        """Whether the controller may order another batch."""
        return self.limits[0] < self.limits[1]

    @property
    def requested(self) -> int:
        """Batch that rank 0 requests for the next step; 0 on other ranks.

        Within the limits and, as far as they allow, at least one sample per replica.
        """
        if not self._is_leader:
            return 0
        if self.ordered is None:
            requested = self._within(self.now)
        else:
            requested = self._within(max(self.ordered, self._replicas))
        return requested if requested <= _LARGEST else self.now

    def set_order(self, batch: int | None, directive: str = "") -> None:
        """Store the controller's order, on rank 0.

        Args:
            batch: see `ordered`.
            directive: the one in force if it is not the submitted one; its limits then apply.
        """
        self.ordered = batch
        if directive == self._in_force:
            return
        self._in_force, self.limits = directive, self._submitted
        if directive:
            # A newer controller may send a directive that cannot be read here: limits stay.
            with suppress(DirectiveError):
                self.limits = limits(self.initial, Directive.parse(directive))

    def gain(self, count: int) -> float:
        """Return AdaScale's r for a step of `count` samples.

        1 while the noise is unknown; 0 on other ranks than 0 and for other rules.
        """
        if not self._is_leader or self.rule != "adascale":
            return 0.0
        noise = self._noise()
        if noise:
            self._last_noise = noise["grad_sqr"], noise["grad_var"]
        k = self._scale(count)
        if self._last_noise is None or k == 1:
            return 1.0
        sqr, var = self._last_noise
        return (var + sqr) / (var / k + sqr)

    def factor(self, count: int, *, gain: float = 0.0) -> float:
        """Return the factor of a step's learning rate.

        Args:
            count: samples of the step over all ranks; fewer than the batch at the end of an
                epoch. Below the initial batch, the smaller of that and the batch counts.
            gain: rank 0's, as all ranks have agreed on it.
        """
        k = self._scale(count)
        if self.rule == "adascale":
            return gain or 1.0
        if self.rule == "linear":
            begun, done = self._ramp
            full = self._full()
            return min(k, begun + (full - begun) * min(1.0, done / WARM_UP))
        return math.sqrt(k) if self.rule == "sqrt" else 1.0

    @contextmanager
    def scaled(self, optimizer: Optimizer, count: int, *, gain: float = 0.0) -> Iterator[None]:
        """Scale the rates of `optimizer` for a step of `count` samples within the block."""
        factor = self.factor(count, gain=gain)
        if factor == 1:
            yield
            return
        unscaled_rates = [group["lr"] for group in optimizer.param_groups]
        try:
            for group, rate in zip(optimizer.param_groups, unscaled_rates, strict=True):
                group["lr"] = rate * factor
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, unscaled_rates, strict=True):
                group["lr"] = rate

    def advance(
        self, scheduler: Scheduler | None, count: int, *, last: bool, gain: float = 0.0
    ) -> int:
        """Advance the schedule after a step of `count` samples.

        At the end of an epoch its position is that of a training with the initial batch
        throughout, `adascale` excepted.

        Args:
            scheduler: stepped as often as needed, possibly not at all; None: only counted.
            count: samples of the step over all ranks.
            last: whether an epoch ended with it.
            gain: as for `factor`.

        Returns:
            The number of steps of the scheduler.
        """
        begun, done = self._ramp
        self._ramp = (begun, min(WARM_UP, done + 1))
        if self.rule == "adascale":
            total = self._rest + (gain or 1.0)
            times = int(total)
            self._rest = total - times
        else:
            times, remainder = divmod(int(self._rest) + count, self.initial)
            # The last batch of an epoch is a step, however small.
            self._rest, times = (0, times + 1) if last and remainder else (remainder, times)
        if scheduler is not None:
            for _ in range(times):
                scheduler.step()
        return times

    def apply(self, batch: float) -> bool:
        """Take the batch that all ranks have agreed on, between two steps.

        Args:
            batch: the sum of the ranks' requests.

        Returns:
            Whether it changed.
        """
        agreed = round(batch)
        if agreed < 1 or agreed == self.now:
            return False
        former = self.now
        self._set(agreed)
        self._log_if_leader(f"a step takes {agreed} samples instead of {former}{self._rates()}")
        return True

    def set_replicas(self, replicas: int) -> None:
        """Set the number of ranks that share a step's samples."""
        self._replicas = replicas

    def log_initial(self) -> None:
        """Log, once the state is complete, a batch that differs from the script's."""
        if self.now != self.initial and not self.may_change:
            self._log_if_leader(
                f"global_batch is {self.initial}, the directive says batch={self.limits[0]}:"
                f" a step takes {self.now} samples{self._rates()}"
            )
        elif not self.limits[0] <= self.initial <= self.limits[1]:
            low, high = self.limits
            self._log_if_leader(
                f"global_batch is {self.initial}, outside the directive's batch={low}-{high}:"
                f" a step takes {self.now} samples{self._rates()}"
            )
        idle = self._replicas - self.now
        if idle > 0:
            self._log_if_leader(
                f"a step takes {self.now} samples, {idle} of {self._replicas} replicas have none:"
                " raise the batch or request fewer GPUs"
            )

    def replica_split(self, micro_batch: int | None) -> tuple[int, int]:
        """Return (micro-batch, accumulation): samples at once, and further micro-batches of a step.

        Args:
            micro_batch: most samples at once; None: a replica's whole share.
        """
        share = -(-self.now // self._replicas)
        times = -(-share // micro_batch) if micro_batch else 1
        return -(-share // times), times - 1

    def report_fields(self, micro_batch: int | None) -> dict[str, Any]:
        """Return the batch's fields of a report; `micro_batch` as for `replica_split`."""
        replica_micro_batch, accumulation = self.replica_split(micro_batch)
        return {
            "global_batch": self.now,
            "micro_batch": replica_micro_batch,
            "accumulation": accumulation,
            "initial_batch": self.initial,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers, text and lists of them."""
        return {
            "initial": self.initial,
            "now": self.now,
            "rule": self.rule,
            "rest": self._rest,
            "ramp": list(self._ramp),
            "noise": list(self._last_noise) if self._last_noise else None,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore the state from a checkpoint, the same on all ranks.

        A state of another initial batch than the script's is ignored.
        """
        if not state:
            return
        if state["initial"] != self.initial:
            self._log_if_leader(
                f"global_batch was {state['initial']}, from now on it is {self.initial}"
            )
            return
        if state["noise"]:
            sqr, var = state["noise"]
            self._last_noise = (float(sqr), float(var))
        if state["rule"] == self.rule:
            self._rest = state["rest"]
            begun, done = state["ramp"]
            self._ramp = (begun, done)
        allowed = self._within(state["now"])
        self.now = state["now"]
        if allowed != self.now:
            self._log_if_leader(
                f"a step took {self.now} samples, the directive now allows {allowed}"
            )
            self._set(allowed)

    def _set(self, batch: int) -> None:
        begun, done = self._ramp
        present = begun + (self._full() - begun) * done / WARM_UP
        self.now = batch
        # Only a rise is warmed up.
        self._ramp = (present, 0) if self._full() > present else (self._full(), WARM_UP)

    def _full(self) -> float:
        """Return the factor of `linear` after its warm-up."""
        return self.now / self.initial

    def _scale(self, count: int) -> float:
        return max(count, min(self.now, self.initial)) / self.initial

    def _within(self, batch: int) -> int:
        low, high = self.limits
        return max(low, min(batch, high))

    def _rates(self) -> str:
        if self.rule == "constant":
            return ""
        if self.rule == "adascale":
            return "; the learning rate follows its gain (adascale)"
        factor = self._full() if self.rule == "linear" else math.sqrt(self._full())
        return f"; the learning rate is multiplied by {factor:.3g} ({self.rule})"

    def _log_if_leader(self, text: str) -> None:
        if self._is_leader:
            self._log(text)
