"""Position of a script's loop: its present step and micro-batch, and the steps done."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.loader import derive_seed, reseed
from slurm_elastic.training.loop.loop_arguments import LoopError
from slurm_elastic.training.loop.step_boundary import StepBoundary
from slurm_elastic.training.sampler import Cursor, MicroBatchSlice


class LoopPosition:
    """Position of a loop, see `StepOwner`.

    A step is done when the loop's body has ended for its last micro-batch. The boundary after it
    follows at once; after the last step of an epoch it follows when the next epoch begins, as the
    script's own code, such as a validation or a schedule, stands between them.

    Attributes:
        cursor: position after the last step.
        finished: whether the complete training is saved.
        resizes: number of changes of the ranks so far.
        weighed: whether the script has read the weight of a micro-batch.

    Args:
        cursor: as restored.
        boundary: of the steps.
        split: micro-batches of this rank.
        seed: of all randomness.
        optimizers: of the script.
    """

    def __init__(
        self,
        cursor: Cursor,
        *,
        boundary: StepBoundary,
        split: DealtSplit,
        seed: int,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        self.cursor = cursor
        self.finished = False
        self.resizes = 0
        self.weighed = False
        self._passing = False
        self._boundary, self._split, self._seed = boundary, split, seed
        self._pending = False
        self._after: Cursor | None = None
        self._present: tuple[MicroBatchSlice, int, bool] | None = None
        # Without an optimizer that can be watched a step counts as soon as it is entered.
        self._watched = False
        self._updated = False
        for optimizer in optimizers:
            # Wrappers such as Accelerate's inherit the class without its hooks.
            with contextlib.suppress(AttributeError):
                optimizer.register_step_post_hook(self._record_update)
                self._watched = True

    def enter(self) -> None:
        """Enter the loop; returns after a boundary at which this rank belongs to the training."""
        self.pass_boundary()
        self._boundary.enter()

    def begin_step(self) -> None:
        """Enter the next step."""
        if self.finished:
            raise LoopError("ElasticLoop: a step after the end is invalid: expected one loop")
        self._boundary.begin_step()
        self._updated = self.weighed = False
        self._after = Cursor(self.cursor.step + 1, self.cursor.epoch, self.cursor.consumed)
        self._present = None
        reseed(derive_seed(self._seed, self.cursor.step + 1, self._split.rank))

    def enter_epoch(self) -> Cursor:
        """See `StepOwner`."""
        self.pass_boundary()
        self.begin_step()
        return self.cursor

    def enter_micro_batch(
        self, piece: MicroBatchSlice, count: int, *, last: bool, after: Cursor | None = None
    ) -> None:
        """See `StepOwner`."""
        self._present = piece, count, last
        self._after = after or self._after
        reseed(derive_seed(self._seed, self.cursor.step + 1, piece.number))

    def complete(self, after: Cursor) -> None:
        """See `StepOwner`."""
        same_epoch = after.epoch == self.cursor.epoch
        self.end_step(after)
        if same_epoch:
            self.pass_boundary()
            self.begin_step()

    def end_step(self, after: Cursor) -> None:
        """Leave a step that is done; its boundary is still to be passed."""
        self.cursor, self._after, self._present = after, None, None
        self._pending = True

    def pass_boundary(self) -> None:
        """Carry out what is due after the last step, once."""
        if self._pending:
            self._pending, self._passing = False, True
            self._boundary.pass_over(self.cursor)
            self._passing = False

    def leave(self) -> None:
        """End a step that the loop was left in, if its optimizer has been stepped."""
        if self._after is not None and (self._updated or not self._watched):
            self.end_step(self._after)

    def finish(self) -> None:
        """Save the complete training, once."""
        if not self.finished:
            self.leave()
            self.finished = True
            self._boundary.finish(self.cursor)

    def move_to(self, cursor: Cursor) -> None:
        """Continue at the position that another rank has."""
        self.cursor = cursor

    @property
    def is_consistent(self) -> bool:
        """Whether the objects are as after the last step, as no update of the next has begun."""
        begun = self._after is not None and self._watched and not self._updated
        return self._passing or begun

    @property
    def unsaved(self) -> bool:
        """Whether the loop was left without an end."""
        return not self.finished and (self._after is not None or self._pending)

    def present(self, name: str) -> tuple[MicroBatchSlice, int, bool]:
        """Return the present micro-batch, samples of its step, and whether it is the last one.

        Raises:
            LoopError: there is none.
        """
        self.weighed = self.weighed or name == "loss_weight"
        if self._present is None:
            raise LoopError(
                f"loop.{name}: no micro-batch is invalid: expected a use in the body of"
                " `for … in loop.micro_batches()` or `for … in loader`"
            )
        return self._present

    def _record_update(self, *_: Any) -> None:
        self._updated = True
