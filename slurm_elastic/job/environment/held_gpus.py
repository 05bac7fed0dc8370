"""GPUs that a job holds on each node, as `scontrol show job --details` prints them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from slurm_elastic.job.slurm_env import expand

#: `Nodes=g[01-02] CPU_IDs=0-3 Mem=0 GRES=gpu:a100:2(IDX:0-1),shard:4`.
_HELD = re.compile(r"^\s*Nodes=(\S+) CPU_IDs=.*\bGRES=(\S*)", re.MULTILINE)
_GPUS = re.compile(r"(?:^|,)gpu(?::[^,:()]+)?:(\d+)")


def held_gpus(details: str, nodes: Sequence[str]) -> tuple[int, ...] | None:
    """Return the number of GPUs on each of these nodes; None if the text does not name them all.

    >>> held_gpus("  Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)", ["n1", "n2"])
    (2, 2)
    """
    counts: Counter[str] = Counter()
    for names, held in _HELD.findall(details):
        for name in expand(names):
            counts[name] += sum(map(int, _GPUS.findall(held)))
    if not counts.keys() >= set(nodes):
        return None
    return tuple(counts[name] for name in nodes)
