"""The text of a layout: the replicas, pipeline stages and spatial groups of a job.

Four forms: `RxS` is R replicas of a pipeline of S stages, `RxSxC` the same with C chunks (parts
of the model) on every rank, `R1-R2-…` stages with different numbers of replicas, and `Rx1sN` R
replicas, each a spatial group of N ranks that share every sample. Data parallelism is `Rx1`, a
plain pipeline `1xS`. The training library assigns the ranks.

>>> layout = LayoutText.parse("2x2")
>>> layout.replicas, layout.chunks, layout.world
((2, 2), 1, 4)
>>> str(LayoutText.parse("2-1")), str(LayoutText.parse("2-2")), str(LayoutText.parse("1x2x2"))
('2-1', '2x2', '1x2x2')
>>> groups = LayoutText.parse("2x1s4")
>>> groups.replicas, groups.space, groups.world, str(groups)
((2,), 4, 8, '2x1s4')
>>> LayoutText.parse("4")  # doctest: +ELLIPSIS
Traceback (most recent call last):
    ...
slurm_elastic...LayoutTextError: layout '4' is invalid: expected RxS, RxSxC, Rx1sN or R1-R2-...

Code inside jobs imports this module: standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from slurm_elastic.core.errors import InvalidInputError

#: Largest number of ranks.
MAX_WORLD = 65536
#: Most stages, and most parts of the model (stages times chunks).
MAX_STAGES = 1024
#: Longest text.
MAX_TEXT = 200

_NUMBER = "[1-9][0-9]{0,4}"
_GRID = re.compile(rf"({_NUMBER})x({_NUMBER})(?:x({_NUMBER}))?(?:s({_NUMBER}))?", re.ASCII)
_STAGES = re.compile(rf"{_NUMBER}(?:-{_NUMBER})+", re.ASCII)


class LayoutTextError(InvalidInputError):
    """An invalid layout; the message is one line with value and remedy."""


@dataclass(frozen=True, slots=True)
class LayoutText:
    """A parsed layout; `str` gives its canonical text, which parses to an equal layout.

    Attributes:
        replicas: of each stage, from the input on; each replica is one rank, or `space` ranks.
        chunks: parts of the model on each rank; above 1 all stages have equally many replicas
            (interleaved pipeline).
        space: ranks that share each sample in space.

    Raises:
        LayoutTextError: no stages, a number below 1, too large ones, chunks with unequal
            stages, or spatial groups with stages.
    """

    replicas: tuple[int, ...]
    chunks: int = 1
    space: int = 1

    def __post_init__(self) -> None:
        if not self.replicas or min(*self.replicas, self.chunks, self.space) < 1:
            raise LayoutTextError("a layout has stages, replicas and chunks of at least 1")
        if self.space > 1 and len(self.replicas) * self.chunks > 1:
            raise LayoutTextError(
                f"layout {self} is invalid: expected one stage in spatial groups, as Rx1sN"
            )
        if self.chunks > 1 and not self.even:
            raise LayoutTextError(
                f"layout {self} is invalid: chunks need equal replicas in all stages"
            )
        if len(self.replicas) * self.chunks > MAX_STAGES:
            parts = len(self.replicas) * self.chunks
            raise LayoutTextError(
                f"a layout of {parts} stages is invalid: expected at most {MAX_STAGES}"
            )
        if self.world > MAX_WORLD:
            raise LayoutTextError(
                f"a layout of {self.world} ranks is invalid: expected at most {MAX_WORLD}"
            )

    @classmethod
    def parse(cls, text: str) -> LayoutText:
        """Parse the text of a layout.

        Raises:
            LayoutTextError: it is invalid.
        """
        grid = _GRID.fullmatch(text)
        if grid and len(text) <= MAX_TEXT:
            replicas, stages, chunks, space = (int(number or 1) for number in grid.groups())
            if stages * chunks > MAX_STAGES:
                raise LayoutTextError(
                    f"layout {text}: {stages * chunks} stages; expected at most {MAX_STAGES}"
                )
            return cls((replicas,) * stages, chunks, space)
        if _STAGES.fullmatch(text) and len(text) <= MAX_TEXT:
            return cls(tuple(map(int, text.split("-"))))
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise LayoutTextError(
            f"layout {shown!r} is invalid: expected RxS, RxSxC, Rx1sN or R1-R2-..."
        )

    def __str__(self) -> str:
        if not self.even:
            return "-".join(map(str, self.replicas))
        chunks = f"x{self.chunks}" if self.chunks > 1 else ""
        space = f"s{self.space}" if self.space > 1 else ""
        return f"{self.replicas[0]}x{self.stages}{chunks}{space}"

    @property
    def stages(self) -> int:
        """Ranks that a micro-batch goes through."""
        return len(self.replicas)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return sum(self.replicas) * self.space

    @property
    def even(self) -> bool:
        """Whether every stage has equally many replicas."""
        return len(set(self.replicas)) == 1
