"""Order in which the published simulator of Dally searches nodes and domains, for comparison.

It takes the first one with room, of a hash table of those with free GPUs
(Apache Commons Collections' map with several keys): a key's bucket follows
from the exclusive or of its parts, buckets are walked downwards, and within one the
latest entry is first. Any other order is as good a schedule, but not the same one.
"""

from __future__ import annotations

from functools import lru_cache

from slurm_elastic.placement.delay.free_map import FreeMap, NodeLayout

Key = tuple[int, ...]

_WORD = 0xFFFFFFFF
_FIRST_BUCKETS = 16
_LOAD = 0.75


def domains(room: FreeMap) -> tuple[int, ...]:
    """Return the domains with free GPUs, in that order."""
    keys, index = _domain_keys(room.sites)
    return tuple(index[k] for k in walk(tuple(keys[d] for d, f in enumerate(room.free) if f)))


def nodes(room: FreeMap) -> tuple[int, ...]:
    """Return the nodes with free GPUs, in that order."""
    keys, index = _node_keys(room.sites)
    return tuple(index[k] for k in walk(tuple(keys[n] for n, f in enumerate(room.node) if f)))


@lru_cache(maxsize=4096)
def walk(keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return the keys in the order of the table, after their insertion in the given order."""
    buckets: list[list[tuple[int, Key]]] = [[] for _ in range(_FIRST_BUCKETS)]
    for count, key in enumerate(keys, start=1):
        mixed = _hash(key)
        buckets[mixed % len(buckets)].insert(0, (mixed, key))
        if count >= int(len(buckets) * _LOAD):
            buckets = _rehashed(buckets)
    return tuple(key for bucket in reversed(buckets) for _, key in bucket)


def _rehashed(buckets: list[list[tuple[int, Key]]]) -> list[list[tuple[int, Key]]]:
    larger: list[list[tuple[int, Key]]] = [[] for _ in range(2 * len(buckets))]
    for bucket in reversed(buckets):
        for mixed, key in bucket:
            larger[mixed % len(larger)].insert(0, (mixed, key))
    return larger


def _hash(key: Key) -> int:
    """Return a 32-bit mix of the exclusive or of the parts."""
    word = 0
    for part in key:
        word ^= part
    word = (word + (~(word << 9) & _WORD)) & _WORD
    word ^= word >> 14
    word = (word + (word << 4)) & _WORD
    return word ^ (word >> 10)


@lru_cache(maxsize=8)
def _node_keys(sites: NodeLayout) -> tuple[tuple[Key, ...], dict[Key, int]]:
    """Return (rack, node within it) of each node, and the inverse."""
    keys = tuple((rack, node - sites.nodes_of[rack][0]) for node, rack in enumerate(sites.rack_of))
    return keys, {key: node for node, key in enumerate(keys)}


@lru_cache(maxsize=8)
def _domain_keys(sites: NodeLayout) -> tuple[tuple[Key, ...], dict[Key, int]]:
    """Return (rack, node within it, domain within that) of each domain, and the inverse."""
    of_node, _ = _node_keys(sites)
    keys = tuple(
        (*of_node[node], domain - sites.domains_of[node][0])
        for domain, node in enumerate(sites.node_of)
    )
    return keys, {key: domain for domain, key in enumerate(keys)}
