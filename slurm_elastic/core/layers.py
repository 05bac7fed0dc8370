"""The layer profile: what each layer of a model costs, and which layer feeds which.

Shared by the partitioner (models/pipedream/partitioner.py), the training library and the profiler.
Times are seconds per minibatch on one GPU, sizes bytes; a layer's `activation_bytes`
are those of its output for that minibatch, counted once however many layers read it.

>>> net = chain([Layer("conv", 0.02, 0.04, 8e6, 1e6), Layer("fc", 0.01, 0.02, 4e3, 4e8)])
>>> net.edges
(('conv', 'fc'),)
>>> net.compute_s
0.09
>>> LayerProfile(net.layers, (("conv", "fc"), ("fc", "conv")))
Traceback (most recent call last):
    ...
slurm_elastic.core.layers.LayerError: layers form a cycle: conv -> fc -> conv; remove one of these
edges
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from itertools import pairwise

from slurm_elastic.core.errors import InvalidInputError

#: No time or size is larger, so that sums of them are finite.
_MOST = 1e18


#: Characters of a refusal: names of layers come from files.
_LONGEST = 300


class LayerError(InvalidInputError):
    """A profile that cannot be.

    Attributes:
        layers: names of the layers at fault, for readers that know their lines.
    """

    def __init__(self, text: str, *layers: str) -> None:
        super().__init__(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")
        self.layers = layers


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as measured.

    Attributes:
        name: unique in its profile.
        forward_s: seconds of the forward pass.
        backward_s: seconds of the backward pass.
        activation_bytes: size of its output.
        parameter_bytes: size of its parameters.
        description: for people.

    Raises:
        LayerError: a time or size that is negative, absurd or NaN.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    description: str = ""

    def __post_init__(self) -> None:
        for field in fields(self)[1:5]:
            value = getattr(self, field.name)
            if not 0 <= value <= _MOST:
                raise LayerError(
                    f"layer {self.name}: {field.name} is {value:g}: must be from 0 to {_MOST:g}",
                    self.name,
                )

    @property
    def compute_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A model as an acyclic, connected graph of layers.

    Attributes:
        layers: at least one; the order breaks ties, the first source is where stages begin.
        edges: (from, to) by name: `to` reads the output of `from`; each pair once.

    Raises:
        LayerError: no layers, a name twice, an unknown one, a cycle, or layers that nothing
            connects with the first.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayerError("no layers: a profile needs at least one")
        names: set[str] = set()
        for layer in self.layers:
            if layer.name in names:
                raise LayerError(f"layer {layer.name} stands there twice", layer.name)
            names.add(layer.name)
        known: set[tuple[str, str]] = set()
        for edge in self.edges:
            for name in edge:
                if name not in names:
                    pair = " -> ".join(edge)
                    raise LayerError(f"the edge {pair} names no layer {name!r}", *edge)
            if edge in known:
                raise LayerError(f"the edge {edge[0]} -> {edge[1]} stands there twice", *edge)
            known.add(edge)
        self._check_cycles()
        self._check_connected()

    @property
    def compute_s(self) -> float:
        """Seconds of one minibatch on one GPU."""
        return math.fsum(layer.compute_s for layer in self.layers)

    @property
    def parameter_bytes(self) -> float:
        """Size of all parameters."""
        return math.fsum(layer.parameter_bytes for layer in self.layers)

    def successors(self) -> list[list[int]]:
        """Of each layer the layers that read it, as indices in `layers`."""
        index = {layer.name: i for i, layer in enumerate(self.layers)}
        found: list[list[int]] = [[] for _ in self.layers]
        for source, target in self.edges:
            found[index[source]].append(index[target])
        return found

    def topological(self) -> list[int]:
        """Indices in `layers`, each after all that it reads from; else in the given order."""
        successors = self.successors()
        waits = self._waits(successors)
        ready = [i for i, n in enumerate(waits) if n == 0]
        order = []
        while ready:
            i = heappop(ready)
            order.append(i)
            for target in successors[i]:
                waits[target] -= 1
                if waits[target] == 0:
                    heappush(ready, target)
        return order

    def _waits(self, successors: list[list[int]]) -> list[int]:
        waits = [0] * len(self.layers)
        for targets in successors:
            for target in targets:
                waits[target] += 1
        return waits

    def _check_cycles(self) -> None:
        order = self.topological()
        if len(order) == len(self.layers):
            return
        successors = self.successors()
        stuck = set(range(len(self.layers))).difference(order)
        # Backwards from a layer that waits for ever only such layers follow, so a name repeats.
        predecessors: list[list[int]] = [[] for _ in self.layers]
        for i, targets in enumerate(successors):
            for target in targets:
                predecessors[target].append(i)
        walk = [min(stuck)]
        while walk[-1] not in walk[:-1]:
            walk.append(next(i for i in predecessors[walk[-1]] if i in stuck))
        loop = walk[walk.index(walk[-1]) :][::-1]
        named = [self.layers[i].name for i in loop]
        shown = named if len(named) <= 7 else [*named[:3], "...", *named[-3:]]
        raise LayerError(
            f"layers form a cycle: {' -> '.join(shown)}; remove one of these edges", *named
        )

    def _check_connected(self) -> None:
        neighbours: list[list[int]] = [[] for _ in self.layers]
        for i, targets in enumerate(self.successors()):
            for target in targets:
                neighbours[i].append(target)
                neighbours[target].append(i)
        seen, todo = {0}, [0]
        while todo:
            for i in neighbours[todo.pop()]:
                if i not in seen:
                    seen.add(i)
                    todo.append(i)
        for i, layer in enumerate(self.layers):
            if i not in seen:
                raise LayerError(
                    f"layer {layer.name} is not connected with {self.layers[0].name}: "
                    "add the edge that leads to it",
                    layer.name,
                )


def chain(layers: Iterable[Layer]) -> LayerProfile:
    """The profile of layers that each read the one before."""
    row: Sequence[Layer] = tuple(layers)
    return LayerProfile(tuple(row), tuple((a.name, b.name) for a, b in pairwise(row)))
