"""The ranks of each pipeline stage, and the micro-batches of each rank.

Micro-batch m belongs to replica m mod r of a stage with r replicas (PipeDream,
SOSP'19, section 3.2: 1F1B-RR), so that neighbouring stages may differ in replicas.

>>> layout = StageLayout.of(2, 1)
>>> layout
StageLayout(stages=((0, 1), (2,)))
>>> [layout.owner(0, micro) for micro in range(4)]
[0, 1, 0, 1]
>>> StageLayout.grid(replicas=1, stages=2, chunks=2).stages
((0,), (1,), (0,), (1,))
>>> str(layout)
'2-1'
>>> StageLayout(((0,), (2,)))  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
slurm_elastic.training.pipeline.stage_layout.LayoutError: layout 1-1: rank 1 is missing: ...
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError


class LayoutError(InvalidInputError):
    """Invalid layout, or invalid use of one; the message names the value and the remedy."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The ranks of each stage.

    Attributes:
        stages: for each stage, from the input on, the ranks that hold a replica of it. A rank may
            hold several stages (interleaving).

    Raises:
        LayoutError: no stages, a stage without ranks or with one twice, gaps between ranks.
    """

    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("layout: no stages is invalid: expected at least one")
        for stage, ranks in enumerate(self.stages):
            if not ranks:
                raise LayoutError(
                    f"layout {self}: stage {stage} without ranks is invalid: expected at least one"
                )
            if len(set(ranks)) < len(ranks):
                raise LayoutError(
                    f"layout {self}: ranks {ranks} of stage {stage} are invalid: expected each once"
                )
        used = {rank for ranks in self.stages for rank in ranks}
        for rank in range(max(len(used), max(used) + 1)):
            if rank not in used:
                raise LayoutError(
                    f"layout {self}: rank {rank} is missing: expected all ranks from 0 on"
                )

    @classmethod
    def of(cls, *replicas: int) -> StageLayout:
        """Return stages with these numbers of replicas, on consecutive ranks.

        Raises:
            LayoutError: a number below 1.
        """
        first, stages = 0, []
        for stage, count in enumerate(replicas):
            if count < 1:
                raise LayoutError(
                    f"replicas of stage {stage}: {count} is invalid: expected at least 1"
                )
            stages.append(tuple(range(first, first + count)))
            first += count
        return cls(tuple(stages))

    @classmethod
    def grid(cls, *, replicas: int, stages: int, chunks: int = 1) -> StageLayout:
        """Return a layout with equally many replicas of each stage.

        Args:
            replicas: of each stage.
            stages: ranks that a micro-batch goes through.
            chunks: stages on each rank; above 1 a micro-batch passes every rank that often.

        Raises:
            LayoutError: a number below 1.
        """
        if chunks < 1:
            raise LayoutError(f"chunks per rank: {chunks} is invalid: expected at least 1")
        return cls(cls.of(*[replicas] * stages).stages * chunks)

    def __str__(self) -> str:
        return "-".join(str(len(ranks)) for ranks in self.stages)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return 1 + max(rank for ranks in self.stages for rank in ranks)

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.stages) - 1

    @property
    def interleaved(self) -> bool:
        """Whether some rank holds several stages."""
        return sum(map(len, self.stages)) > self.world_size

    def held_by(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, ascending."""
        return tuple(s for s, ranks in enumerate(self.stages) if rank in ranks)

    def owner(self, stage: int, micro: int) -> int:
        """Return the rank that computes this stage for this micro-batch."""
        ranks = self.stages[stage]
        return ranks[micro % len(ranks)]

    def share(self, stage: int, rank: int, count: int) -> range:
        """Return the micro-batches, of `count`, for which this rank computes this stage."""
        ranks = self.stages[stage]
        return range(ranks.index(rank), count, len(ranks))
