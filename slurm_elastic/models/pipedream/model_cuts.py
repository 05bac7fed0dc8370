"""Cuts of a model: sets of layers that hold every layer they read from.

A stage lies between two such *states*, the smaller one contained in the larger. As in
the published optimiser (antichain_dag), a state holds the first source, and another
source (an embedding of the decoder, a constant) enters with the layer that first
reads from it. On gnmt that makes 99 states of 561 possible ones.

A model with wide branches has more states than can be searched. Beyond a limit only
the prefixes of a few topological orders are kept (ours), sources
anywhere: every plan made of them can be run, but a better one may exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import or_

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.layers import LayerProfile

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class States:
    """All states, smallest first: sorted by compute, so that a subset stands before its superset.

    State 0 is empty, the last one holds all layers.

    Attributes:
        sets: of each state the layers in it, bit i for `profile.layers[i]`.
        words: the same as uint64, shape (states, words).
        compute_s: forward and backward of its layers, shape (states,), ascending.
        activation_bytes: outputs of its layers.
        parameter_bytes: parameters of its layers.
        output_bytes: outputs of those layers that are read outside it or by no layer: what
            crosses a cut there.
        complete: whether no state was left out.
    """

    sets: tuple[int, ...]
    words: NDArray[np.uint64]
    compute_s: Floats
    activation_bytes: Floats
    parameter_bytes: Floats
    output_bytes: Floats
    complete: bool

    def __len__(self) -> int:
        return len(self.sets)

    def below(self, first: int, last: int) -> Bools:
        """Return which state is a proper part of which: shape (last, last - first).

        Entry (a, b) says whether state a is part of state first + b.
        """
        part = np.ones((last, last - first), dtype=np.bool_)
        for word in self.words.T:
            part &= (word[:last, None] & ~word[None, first:last]) == 0
        part[np.arange(first, last), np.arange(last - first)] = False
        return part


def states(profile: LayerProfile, *, limit: int, free: bool = False) -> States:
    """Return the states of a model.

    Args:
        profile: the model.
        free: sources may enter at any place.
        limit: with more states than this only those of some topological orders are kept: of as
            many as keep to it.
    """
    graph = _Graph(profile)
    kept_states = graph.all_states(limit) if free else graph.closures(limit)
    complete = kept_states is not None
    if kept_states is None:
        kept_states = graph.prefixes(limit)
    return graph.measured(kept_states, complete=complete)


class _Graph:
    """The profile with layers as bits."""

    def __init__(self, profile: LayerProfile) -> None:
        self.layers = profile.layers
        self.successors = profile.successors()
        count = len(self.layers)
        self.full = (1 << count) - 1
        self.predecessors = [0] * count
        for i, targets in enumerate(self.successors):
            for target in targets:
                self.predecessors[target] |= 1 << i
        self.readers = [sum(1 << t for t in targets) for targets in self.successors]
        self.order = profile.topological()
        #: Layers that each layer needs, itself included, as bits.
        self.needs = [1 << i for i in range(count)]
        for i in self.order:
            for target in self.successors[i]:
                self.needs[target] |= self.needs[i]

    def closures(self, limit: int) -> set[int] | None:
        """Return the empty state and all that grow from the first source; None: above the limit."""
        first = next(i for i, n in enumerate(self.predecessors) if n == 0)
        # What is read by a layer of the state, and not in it, may enter next.
        start = 1 << first
        states = {0, start}
        todo = [(start, self.readers[first])]
        while todo:
            state, frontier = todo.pop()
            remaining = frontier
            while remaining:
                bit = remaining & -remaining
                remaining ^= bit
                needed = self.needs[bit.bit_length() - 1]
                grown = state | needed
                if grown in states:
                    continue
                states.add(grown)
                if len(states) - 1 > limit:
                    return None
                todo.append((grown, (frontier | self._read_by(needed & ~state)) & ~grown))
        return states

    def all_states(self, limit: int) -> set[int] | None:
        """Return all sets that hold what they need, the empty one too; None: above the limit."""
        ready = sum(1 << i for i, n in enumerate(self.predecessors) if n == 0)
        states = {0}
        todo = [(0, ready)]
        while todo:
            state, ready = todo.pop()
            remaining = ready
            while remaining:
                bit = remaining & -remaining
                remaining ^= bit
                grown = state | bit
                if grown in states:
                    continue
                states.add(grown)
                if len(states) - 1 > limit:
                    return None
                more = sum(
                    1 << t
                    for t in self.successors[bit.bit_length() - 1]
                    if self.predecessors[t] & ~grown == 0
                )
                todo.append((grown, ready & ~bit | more))
        return states

    def prefixes(self, limit: int) -> set[int]:
        """Return the empty state and prefixes of topological orders, at least of one."""
        position = {layer: n for n, layer in enumerate(self.order)}
        depth = [0] * len(self.layers)
        for i in self.order:
            for target in self.successors[i]:
                depth[target] = max(depth[target], depth[i] + 1)
        orders = (
            # As little as possible crosses the cut.
            self._in_order(
                lambda ready, done: min(ready, key=lambda i: (self._growth(i, done), i))
            ),
            # A branch is finished before the next one is begun, from either side.
            self._in_order(lambda ready, _: ready[-1]),
            self._in_order(lambda ready, _: ready[-1], backwards=True),
            # All branches grow together.
            self._in_order(lambda ready, _: min(ready, key=lambda i: (depth[i], position[i]))),
            self.order,
        )
        states = self._thinned(orders[0], limit)
        for order in orders[1:]:
            more = states.union(accumulate((1 << i for i in order), or_))
            if len(more) - 1 > limit:
                break
            states = more
        return states

    def _thinned(self, order: list[int], limit: int) -> set[int]:
        """Return prefixes of an order; of too many the one in each group that lets least across."""
        group = -(-len(order) // limit)
        states, state, output = {0}, 0, 0.0
        best, least = 0, math.inf
        for n, i in enumerate(order, start=1):
            output += self._growth(i, state)
            state |= 1 << i
            if output < least or n == len(order):
                best, least = state, output
            if n % group == 0 or n == len(order):
                states.add(best)
                least = math.inf
        return states

    def measured(self, states: set[int], *, complete: bool) -> States:
        """Return states with their sums, in order."""
        count = len(self.layers)
        rows = sorted(states)
        width = max(1, -(-count // 64))
        raw = b"".join(state.to_bytes(width * 8, "little") for state in rows)
        words = np.frombuffer(raw, dtype="<u8").reshape(len(rows), width)
        member = np.unpackbits(
            np.frombuffer(raw, dtype=np.uint8).reshape(len(rows), width * 8),
            axis=1, count=count, bitorder="little",
        ).astype(np.bool_)  # fmt: skip
        leaves = np.empty_like(member)
        for i, readers in enumerate(self.readers):
            read = [j for j in range(count) if readers >> j & 1]
            leaves[:, i] = member[:, i] & (~member[:, read].all(axis=1) if read else True)
        compute = np.array([layer.compute_s for layer in self.layers])
        outputs = np.array([layer.activation_bytes for layer in self.layers])
        parameters = np.array([layer.parameter_bytes for layer in self.layers])
        seconds = _sums(member, compute)
        sort = np.lexsort((np.arange(len(rows)), member.sum(axis=1), seconds))
        return States(
            sets=tuple(rows[i] for i in sort),
            words=np.ascontiguousarray(words[sort]),
            compute_s=seconds[sort],
            activation_bytes=_sums(member, outputs)[sort],
            parameter_bytes=_sums(member, parameters)[sort],
            output_bytes=_sums(leaves, outputs)[sort],
            complete=complete,
        )

    def _read_by(self, layers: int) -> int:
        readers = 0
        while layers:
            bit = layers & -layers
            layers ^= bit
            readers |= self.readers[bit.bit_length() - 1]
        return readers

    def _growth(self, layer: int, done: int) -> float:
        """Return how much more crosses the cut once the layer is done."""
        done_after = done | 1 << layer
        grown = self.layers[layer].activation_bytes
        remaining = self.predecessors[layer]
        while remaining:
            bit = remaining & -remaining
            remaining ^= bit
            i = bit.bit_length() - 1
            if self.readers[i] & ~done_after == 0:
                grown -= self.layers[i].activation_bytes
        return grown

    def _in_order(
        self, choose: Callable[[list[int], int], int], *, backwards: bool = False
    ) -> list[int]:
        """Return a topological order: of the layers that are ready the chosen one is next."""
        waits = [n.bit_count() for n in self.predecessors]
        ready = [i for i, n in enumerate(waits) if n == 0]
        order: list[int] = []
        done = 0
        while ready:
            i = choose(ready, done)
            ready.remove(i)
            order.append(i)
            done |= 1 << i
            for target in self.successors[i] if backwards else reversed(self.successors[i]):
                waits[target] -= 1
                if waits[target] == 0:
                    ready.append(target)
        return order


def _sums(member: Bools, values: Floats) -> Floats:
    """Sum over members in the order of the layers: a superset's is never smaller.

    A matrix product may add in another order for each row, and rounding then makes a
    subset larger than its superset.
    """
    total = np.zeros(len(member))
    for column, value in zip(member.T, values.tolist(), strict=True):
        total += np.where(column, value, 0.0)
    return total
