"""Where the stages of a pipeline run: each stage's ranks, and who takes which micro-batch.

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
slurm_elastic.training.pipeline.stage_layout.LayoutError: layout 1-1 leaves out rank 1; ...
"""

from __future__ import annotations

from dataclasses import dataclass


class LayoutError(ValueError):
    """A layout, or its use, that cannot be; names culprit and remedy."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The ranks of each stage.

    Attributes:
        stages: from the input on, the ranks that each hold a replica of the stage. A rank may
            hold several stages (interleaving).

    Raises:
        LayoutError: no stages, a stage without ranks or with one twice, gaps between ranks.
    """

    stages: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.stages:
            raise LayoutError("a layout needs at least one stage")
        for stage, ranks in enumerate(self.stages):
            if not ranks:
                raise LayoutError(f"layout {self}: stage {stage} has no ranks; give at least one")
            if len(set(ranks)) < len(ranks):
                raise LayoutError(f"layout {self}: stage {stage} has a rank twice: {ranks}")
        used = {rank for ranks in self.stages for rank in ranks}
        for rank in range(max(len(used), max(used) + 1)):
            if rank not in used:
                raise LayoutError(f"layout {self} leaves out rank {rank}; use all from 0")

    @classmethod
    def of(cls, *replicas: int) -> StageLayout:
        """Stages with these numbers of replicas, on consecutive ranks.

        Raises:
            LayoutError: a number below 1.
        """
        first, stages = 0, []
        for stage, count in enumerate(replicas):
            if count < 1:
                raise LayoutError(f"stage {stage} with {count} replicas; give at least 1")
            stages.append(tuple(range(first, first + count)))
            first += count
        return cls(tuple(stages))

    @classmethod
    def grid(cls, *, replicas: int, stages: int, chunks: int = 1) -> StageLayout:
        """Every stage equally often.

        Args:
            replicas: of each stage.
            stages: ranks that a micro-batch goes through.
            chunks: stages on each rank; above 1 the pipeline passes every rank that often.

        Raises:
            LayoutError: a number below 1.
        """
        if chunks < 1:
            raise LayoutError(f"{chunks} chunks per rank; give at least 1")
        return cls(cls.of(*[replicas] * stages).stages * chunks)

    def __str__(self) -> str:
        return "-".join(str(len(ranks)) for ranks in self.stages)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return 1 + max(rank for ranks in self.stages for rank in ranks)

    @property
    def last(self) -> int:
        """The last stage."""
        return len(self.stages) - 1

    @property
    def interleaved(self) -> bool:
        """Whether some rank holds several stages."""
        return sum(map(len, self.stages)) > self.world_size

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending."""
        return tuple(s for s, ranks in enumerate(self.stages) if rank in ranks)

    def owner(self, stage: int, micro: int) -> int:
        """The rank that takes this micro-batch through this stage."""
        ranks = self.stages[stage]
        return ranks[micro % len(ranks)]

    def share(self, stage: int, rank: int, count: int) -> range:
        """The micro-batches, of so many, that this rank takes through this stage."""
        ranks = self.stages[stage]
        return range(ranks.index(rank), count, len(ranks))
