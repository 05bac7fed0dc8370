"""Check that a training goes on as before in another world, as far as its checkpoints tell.

Read are Hugging Face's `trainer_state.json`, numbers in names (`step=500`, `checkpoint-500`,
`global_step500`, `epoch=3`), and steps, epoch and learning rate in files of `torch.save`
(`saved_numbers`). Nothing is unpickled.
Compared is only what a change of the world must not change, with room for rounding;
docs/esrun-global-batch.md lists the rules and what they take for a jump by mistake.

>>> before = TrainingPoint(step=535, epoch=(66.7, 66.9), max_steps=800, epochs=100.0)
>>> find_jump(before, TrainingPoint(step=545, epoch=(236.4, 236.6), max_steps=800, epochs=100.0))
'epoch 66.8 at step 535, 236.5 at step 545: expected 68.0'
>>> find_jump(before, TrainingPoint(step=545, epoch=(67.9, 68.1), max_steps=800, epochs=100.0))
''
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.job.environment.world_variables import accumulation
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.unmodified.resume_state import ResumeState

_HF_STATE = "trainer_state.json"
#: A larger file (some 100,000 log entries) is not read: it would delay the watch for seconds.
_MAX_BYTES = 32 << 20
#: Checkpoints of an attempt that are compared: later ones say nothing about the change.
_COMPARED = 5
#: Part by which speed of epochs, and length of the schedule, may differ.
_TOLERANCE = 0.1
#: Steps by which the length of an epoch may differ: it is rounded.
_ROUNDING = 1.5
#: Checkpoints in a row that have to show the same steps per epoch: one alone may have been written
#: within an epoch.
_IN_A_ROW = 2
#: Learning rates that differ by less are equal; those kept of the time before a change.
_RATE_TOLERANCE = 0.02
_KEPT_RATES = 200
_RATE_WORDS = "the learning rate"
#: In directories of accelerate's `save_state`.
_ACCELERATE_SCHEDULER = "scheduler.bin"

#: Names of checkpoints that contain the steps of the optimizer.
STEP_NAME = re.compile(r"(?<![a-z])(?:global_?step|step|checkpoint|iter)[=_-]?(\d{1,15})(?!\d)")
_EPOCH_NAME = re.compile(r"(?<![a-z])epoch[=_-]?(\d{1,9})(?!\d)")


@dataclass(frozen=True, kw_only=True)
class TrainingPoint:
    """State of a training in one checkpoint.

    Attributes:
        step: of the optimizer.
        epoch: least and most epochs that are done; None: not known.
        max_steps: steps of the whole training; None: not known.
        epochs: of the whole training; None: not known.
        rates: learning rates that were logged or saved, oldest first, as (step, rate).
        epoch_steps: steps of each epoch since the checkpoint before; 0: not known, or the two were
            not written at the same place in an epoch.
        in_a_row: checkpoints up to this one that show the same.
        world: ranks that wrote it; 0: not known.
        is_counter: False: numbers in names have fallen within an attempt, or are epochs, and do not
            count steps; or the optimizer counts, which may begin anew at each start.
        counts_passes: `step` is the number of batches on which each rank has trained.
        scheduled: steps of a scheduler of accelerate; None: not known.
    """

    step: int
    epoch: tuple[float, float] | None = None
    max_steps: int | None = None
    epochs: float | None = None
    rates: tuple[tuple[int, float], ...] = ()
    epoch_steps: int = 0
    in_a_row: int = 0
    world: int = 0
    is_counter: bool = True
    counts_passes: bool = False
    scheduled: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> TrainingPoint | None:
        """Return it from JSON, None if it is invalid."""
        if not isinstance(data, Mapping):
            return None
        try:
            epoch = data.get("epoch")
            least, most = epoch or (0.0, 0.0)
            return cls(
                step=int(data["step"]),
                epoch=(float(least), float(most)) if epoch else None,
                max_steps=_count(data.get("max_steps")),
                epochs=_positive(data.get("epochs")),
                rates=tuple((int(s), float(r)) for s, r in data.get("rates", ())),
                epoch_steps=int(data.get("epoch_steps", 0)),
                in_a_row=int(data.get("in_a_row", 0)),
                world=int(data.get("world", 0)),
                is_counter=data.get("is_counter") is not False,
                counts_passes=data.get("counts_passes") is True,
                scheduled=_count(data.get("scheduled")),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None


def read_point(path: str) -> TrainingPoint | None:
    """Return the state of the training in a checkpoint; None if it does not show any."""
    own, parent = Path(path), Path(path).parent
    for file in (own / _HF_STATE, own if own.name == _HF_STATE else parent / _HF_STATE):
        point = _hugging_face(file)
        if point:
            return point
    name = own.name.lower()
    matches = (STEP_NAME.search(name), _EPOCH_NAME.search(name))
    step, epoch = (int(match[1]) if match else None for match in matches)
    from slurm_elastic.job.unmodified import saved_numbers  # noqa: PLC0415 - slow to load

    if os.path.isdir(own):  # noqa: PTH112 - a name may be too long
        saved = saved_numbers.read_directory(path)
    else:
        saved = saved_numbers.read_numbers(path)
        # `checkpoint-3` is that of epoch 3, or of the third one.
        step = None if step is not None and saved.epoch in (step, step - 1) else step
        step = saved.step if step is None else step
        epoch = epoch if saved.epoch is None else saved.epoch
    # Epoch 3 is that of a checkpoint written in or after the fourth epoch.
    done = None if epoch is None else (float(epoch), float(epoch) + 1)
    rate = saved.rate
    counts_passes = saved.updates is None
    updates = saved.passes if counts_passes else saved.updates
    if step is None and epoch is not None and updates is not None:
        rates = () if rate is None else ((updates, rate),)
        return TrainingPoint(
            step=updates, epoch=done, rates=rates, is_counter=False, counts_passes=counts_passes
        )
    number = epoch if step is None else step
    if number is None:
        return None
    rates = () if rate is None else ((number, rate),)
    if step is None:  # epochs may be counted anew at each start
        return TrainingPoint(step=number, rates=rates, is_counter=False) if rates else None
    return TrainingPoint(step=step, epoch=done, rates=rates, scheduled=saved.scheduled)


def _hugging_face(file: Path) -> TrainingPoint | None:
    try:
        if os.stat(file).st_size > _MAX_BYTES:  # noqa: PTH116 - once per checkpoint
            return None
        state = json.loads(file.read_text(encoding="utf-8"))
        step = _count(state.get("global_step"))
        epoch = _positive(state.get("epoch"))
        log = state.get("log_history")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    if not step:
        return None
    one_step = (epoch or 0.0) / step
    return TrainingPoint(
        step=step,
        epoch=(epoch - one_step, epoch + one_step) if epoch else None,
        max_steps=_count(state.get("max_steps")),
        epochs=_positive(state.get("num_train_epochs")),
        rates=_logged_rates(log)[-_KEPT_RATES:],
    )


def _logged_rates(log: object) -> tuple[tuple[int, float], ...]:
    rates = []
    for entry in log if isinstance(log, list) else ():
        if isinstance(entry, dict):
            step, rate = _count(entry.get("step")), _positive(entry.get("learning_rate"))
            if step and rate is not None:
                rates.append((step, rate))
    return tuple(rates)


def find_jump(before: TrainingPoint, after: TrainingPoint, *, only_steps: bool = False) -> str:
    """Return the difference that shows an error between checkpoints of two attempts, or "".

    Args:
        before: the newest of the attempt before.
        after: of this attempt.
        only_steps: compare the step counter only.
    """
    if after.step < before.step and before.is_counter:
        return f"step {before.step} is followed by step {after.step}"
    if only_steps or after.step <= before.step:
        return ""
    return (
        _epoch_steps_jump(before, after)
        or _epoch_jump(before, after)
        or _length_jump(before, after)
        or _rate_jump(before, after)
        or _schedule_jump(before, after)
    )


def _epoch_steps_jump(before: TrainingPoint, after: TrainingPoint) -> str:
    """Compare the steps of an epoch where the checkpoints show them exactly."""
    if before.in_a_row < _IN_A_ROW or after.in_a_row < _IN_A_ROW:
        return ""
    old, new = before.epoch_steps, after.epoch_steps
    if abs(new - old) <= max(_ROUNDING, _TOLERANCE * old):
        return ""
    return f"an epoch had {old} steps and has {new} from step {before.step} on"


def _epoch_jump(before: TrainingPoint, after: TrainingPoint) -> str:
    """Compare the epochs per step with those since the start."""
    if before.epoch is None or after.epoch is None or not before.step or not before.is_counter:
        return ""
    steps = after.step - before.step
    slowest, fastest = (epoch / before.step for epoch in before.epoch)
    # Steps per epoch are rounded up, in each world differently: one more or less.
    room = _TOLERANCE + _ROUNDING * fastest
    least = before.epoch[0] + steps * slowest * max(0.0, 1 - room)
    most = before.epoch[1] + steps * fastest * (1 + room)
    if least <= after.epoch[1] and after.epoch[0] <= most:
        return ""
    old, new = sum(before.epoch) / 2, sum(after.epoch) / 2
    expected = old * after.step / before.step
    return (
        f"epoch {old:.1f} at step {before.step}, {new:.1f} at step {after.step}:"
        f" expected {expected:.1f}"
    )


def _length_jump(before: TrainingPoint, after: TrainingPoint) -> str:
    """Compare the steps that as many epochs take."""
    if not before.max_steps or not after.max_steps or before.epochs != after.epochs:
        return ""
    room = max(_TOLERANCE * before.max_steps, _ROUNDING * (before.epochs or 0.0))
    if abs(after.max_steps - before.max_steps) <= room:
        return ""
    epochs = f" for {before.epochs:g} epochs" if before.epochs else ""
    return f"the whole training takes {after.max_steps} steps instead of {before.max_steps}{epochs}"


def _rate_jump(before: TrainingPoint, after: TrainingPoint) -> str:
    """Find a rise after a learning rate that only fell: the schedule has begun again."""
    old = [rate for step, rate in before.rates if step <= before.step]
    new = [(step, rate) for step, rate in after.rates if step > before.step]
    if len(old) < 3 or not new or not _falls(old):
        return ""
    last = old[-1]
    for step, rate in new:
        if rate > last * (1 + _RATE_TOLERANCE):
            return f"{_RATE_WORDS} had fallen to {old[-1]:.3g} and is {rate:.3g} at step {step}"
        last = min(last, rate)
    return ""


def _schedule_jump(before: TrainingPoint, after: TrainingPoint) -> str:
    """Compare the steps of a scheduler for each one of the optimizer, if the rate has changed."""
    if not before.scheduled or not before.step or after.scheduled is None:
        return ""
    last, new_rate = (point.rates[-1][1] if point.rates else None for point in (before, after))
    if last == new_rate:  # of a fixed rate it makes no difference
        return ""
    old = before.scheduled / before.step
    new = (after.scheduled - before.scheduled) / (after.step - before.step)
    if abs(new - old) <= _TOLERANCE * old:
        return ""
    return (
        f"the scheduler of {_RATE_WORDS} made {old:.1f} steps per step of the optimizer, and"
        f" {new:.1f} since step {before.step}"
    )


def _falls(rates: Sequence[float]) -> bool:
    """Return whether the rates rise at most at the beginning, and then have fallen."""
    top = rates.index(max(rates))
    falling = rates[top:]
    never_rises = all(b <= a * (1 + _RATE_TOLERANCE) for a, b in zip(falling, falling[1:]))  # noqa: B905, RUF007
    return never_rises and falling[-1] < falling[0] * (1 - _RATE_TOLERANCE)


class TrainingStateCheck:
    """Check of one job's checkpoints over all its attempts; its results are in a `ResumeState`.

    Args:
        state: of the job; to be saved after `add`.
        world: ranks of this attempt.
        batch_may_change: whether the directive lets the batch change: then only the step counter is
            compared.
        micro_batches: of `esrun --micro-batches`; None: not given.
    """

    def __init__(
        self,
        state: ResumeState,
        world: int,
        *,
        batch_may_change: bool = False,
        micro_batches: int | None = None,
    ) -> None:
        self._state = state
        self.world = world
        self._batch_may_change = batch_may_change
        self._micro_batches = micro_batches
        self._before: TrainingPoint | None = None
        self._last_step = 0
        self._compared = 0
        #: Epochs are counted anew at each start, and so say nothing.
        self._counts_anew = False

    def begin_attempt(self) -> None:
        """Compare the next checkpoints with the newest so far."""
        self._before = TrainingPoint.from_json(self._state.training)
        self._last_step = 0
        self._compared = 0
        self._counts_anew = False

    def add(self, path: str) -> None:
        """Check a complete checkpoint."""
        point = read_point(path)
        if point is None:
            return
        earlier = TrainingPoint.from_json(self._state.training)
        if self._counts_anew or (earlier is not None and _epochs_between(earlier, point) < 0):
            self._counts_anew = True
            point = dataclasses.replace(point, epoch=None)
        if earlier is not None:
            point = _with_epoch_steps(point, earlier)
        if self._before is not None and self._compared < _COMPARED and not self._state.jump:
            self._compared += 1
            self._compare(self._before, point, path)
        rotates = point.step < self._last_step or not (earlier is None or earlier.is_counter)
        self._last_step = point.step
        point = dataclasses.replace(
            point,
            world=self.world,
            is_counter=point.is_counter and not rotates,
            rates=_rates_so_far(earlier, point),
        )
        self._state.training = point.to_json()

    def _compare(self, before: TrainingPoint, point: TrainingPoint, path: str) -> None:
        # Later attempts go on from a checkpoint that is known to be right.
        only_steps = self._batch_may_change or before.world == self.world
        if before.counts_passes != point.counts_passes or (
            point.counts_passes and self._may_accumulate(before.world)
        ):
            before = dataclasses.replace(before, in_a_row=0)
        jump = find_jump(before, point, only_steps=only_steps)
        if not jump:
            return
        change = (
            f"restarted on {self.world} rank{'' if self.world == 1 else 's'}"
            if before.world in (0, self.world)
            else f"{before.world} → {self.world} ranks"
        )
        remedy = "keep the global batch and the schedule (docs/esrun-global-batch.md)"
        if _RATE_WORDS in jump and Path(path, _ACCELERATE_SCHEDULER).exists():
            jump += "; accelerate steps a prepared scheduler once for each rank"
            remedy = (
                "keep the global batch by esrun --micro-batches, register the scheduler instead of"
                " preparing it (docs/integrations.md),"
            )
        self._state.jump = f"{change}: {jump}"[:200]
        log_line(
            f"steps, epoch or learning rate do not continue, {self._state.jump}; the job is not"
            f" resized any more;"
            f" {remedy} and submit it again"
        )

    def _may_accumulate(self, old_world: int) -> bool:
        """Return whether `SLURM_ELASTIC_ACCUMULATION` keeps the batch over this change."""
        micro_batches = self._micro_batches or self._state.start_world or old_world
        worlds = (max(1, old_world), self.world)
        old, new = (accumulation(micro_batches, world)[0] * world for world in worlds)
        return old == new


def _whole_epoch(point: TrainingPoint) -> int | None:
    """Return the number of its epoch; None: it has none, or a part of one."""
    if point.epoch is None or point.epoch[1] - point.epoch[0] != 1:
        return None
    return int(point.epoch[0])


def _epochs_between(earlier: TrainingPoint, point: TrainingPoint) -> int:
    """Return the epochs between two checkpoints; 0 where one of them has no whole number."""
    old, new = _whole_epoch(earlier), _whole_epoch(point)
    return 0 if old is None or new is None else new - old


def _with_epoch_steps(point: TrainingPoint, earlier: TrainingPoint) -> TrainingPoint:
    """Return a checkpoint with the steps of each epoch since the one before."""
    epochs, steps = _epochs_between(earlier, point), point.step - earlier.step
    if epochs < 1 or steps < 1 or steps % epochs:
        return point
    each = steps // epochs
    in_a_row = earlier.in_a_row + 1 if each == earlier.epoch_steps else 1
    return dataclasses.replace(point, epoch_steps=each, in_a_row=in_a_row)


def _rates_so_far(
    earlier: TrainingPoint | None, point: TrainingPoint
) -> tuple[tuple[int, float], ...]:
    """Return the learning rates of a checkpoint and of those before it, the newest ones."""
    before = earlier.rates if earlier else ()
    rates = {step: rate for step, rate in before if step < point.step} | dict(point.rates)
    return tuple(sorted(rates.items()))[-_KEPT_RATES:]


def _count(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and 0 <= value < 1 << 62 else None  # type: ignore[operator,return-value]


def _positive(value: object) -> float | None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < 1e18 or not math.isfinite(value):  # type: ignore[operator,arg-type]
        return None
    return float(value)  # type: ignore[arg-type]
