"""Micro-batches of a step, dealt to the ranks of a script that keeps its own loop.

The global batch is cut into the same micro-batches on any number of ranks; each rank takes a run of
them. So whatever depends on the number of a micro-batch alone, such as random draws, does
not depend on the number of ranks.

>>> [[s.number for s in DealtSplit(rank=r, world_size=3, micro=2).slices(10)] for r in range(3)]
[[0, 5], [1, 2], [3, 4]]
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.training.sampler import EvenSplit, MicroBatchSlice


@dataclass(slots=True, kw_only=True)
class DealtSplit:
    """Micro-batches of one rank; see `BatchSplit`.

    All ranks take equally many. Where that does not come out, some take a micro-batch that does
    not count: gradients are averaged over all ranks, and one with fewer backward passes would block
    the others.

    Attributes:
        rank, world_size: index and number of the ranks; set anew when these change.
        micro: samples of a micro-batch; None: one micro-batch for each rank.
    """

    rank: int
    world_size: int
    micro: int | None = None

    def spans(self, count: int) -> list[range]:
        """Return the micro-batches of a step of all ranks, as positions within the step."""
        if self.micro:
            return [range(i, min(i + self.micro, count)) for i in range(0, count, self.micro)]
        even = (
            EvenSplit(rank=rank, world_size=self.world_size).slices(count)
            for rank in range(self.world_size)
        )
        return [piece.span for pieces in even for piece in pieces]

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        spans = self.spans(count)
        first = len(spans) * self.rank // self.world_size
        last = len(spans) * (self.rank + 1) // self.world_size
        own = [MicroBatchSlice(i, spans[i]) for i in range(first, last)]
        most = -(-len(spans) // self.world_size)
        padding = range(len(spans), len(spans) + most - len(own))
        return own + [MicroBatchSlice(i, spans[0], counts=False) for i in padding]

    def weight(self, piece: MicroBatchSlice, count: int) -> float:
        """Return the factor of a micro-batch's mean loss.

        With it, the mean over the ranks of the summed gradients is the mean over all samples.
        """
        return len(piece.span) * self.world_size / count if piece.counts else 0.0

    def remark(self, count: int) -> str:
        """Return a line for the log if some passes of a step have no effect, or ""."""
        spans = len(self.spans(count))
        passes = -(-spans // self.world_size) * self.world_size
        if passes == spans:
            return ""
        return (
            f"{self.world_size} ranks share {spans} micro-batches unequally: {passes - spans} of"
            f" {passes} passes of a step have no effect; a smaller micro_batch, or another number"
            " of ranks, avoids that"
        )
