"""Records of partitions from `scontrol --oneliner show partitions`, with pyslurm's attributes.

The JSON of 24.11 has neither ExclusiveUser nor DefCpuPerGPU. Only administrators write these
fields.

>>> (record,) = partitions_of(
...     b"PartitionName=gpu QoS=N/A ExclusiveUser=NO MaxNodes=2 MaxTime=1-00:00:00 MinNodes=0"
...     b" MaxCPUsPerNode=8 Nodes=g[01-02] PriorityTier=3 State=UP"
...     b" JobDefaults=DefCpuPerGPU=3,DefMemPerGPU=2500 MaxMemPerNode=UNLIMITED")
>>> record.name, record.max_time, record.max_nodes, record.max_memory_per_node
('gpu', 1440, 2, None)
>>> record.max_cpus_per_node, record.default_cpus_per_gpu, record.priority_tier
(8, 3, 3)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from slurm_elastic.slurm.slurm_settings import options, partition_fields

_TIME = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{2}):([0-9]{2})")
_ABSENT = ("(null)", "N/A")


def partitions_of(output: bytes) -> Iterator[Any]:
    """Yield the records of all partitions; a line without a name is left out.

    Args:
        output: of scontrol.
    """
    for fields in partition_fields(output.decode(errors="replace")):
        texts = {k: "" if v in _ABSENT else v for k, v in fields.items()}
        if not texts.get("PartitionName"):
            continue
        defaults = options(texts.get("JobDefaults", ""))
        yield SimpleNamespace(
            name=texts["PartitionName"],
            nodes=texts.get("Nodes", ""),
            state=texts.get("State", ""),
            qos=texts.get("QoS", ""),
            max_time=_minutes(texts.get("MaxTime", "")),
            min_nodes=_count(texts.get("MinNodes", "")),
            max_nodes=_count(texts.get("MaxNodes", "")),
            max_cpus_per_node=_count(texts.get("MaxCPUsPerNode", "")),
            max_memory_per_node=_count(texts.get("MaxMemPerNode", "")),
            default_cpus_per_gpu=_count(defaults.get("DefCpuPerGPU", "")),
            is_user_exclusive=texts.get("ExclusiveUser") == "YES",
            oversubscribe=texts.get("OverSubscribe", "").partition(":")[0],
            priority_tier=_count(texts.get("PriorityTier", "")),
        )


def _count(text: str) -> int | None:
    """Return a number; None for UNLIMITED."""
    return int(text) if text.isascii() and text.isdecimal() else None


def _minutes(text: str) -> int | None:
    """Return a time limit in minutes; None for UNLIMITED."""
    match = _TIME.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, _ = (int(n or 0) for n in match.groups())
    return (days * 24 + hours) * 60 + minutes
