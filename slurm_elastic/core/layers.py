"""The layer profile: the cost of each layer of a model, and the graph of the layers.

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
slurm_elastic.core.layers.LayerError: layers form a cycle: conv -> fc -> conv; remove an edge
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from itertools import pairwise

from slurm_elastic.core.errors import InvalidInputError

#: Largest time or size, so that sums are finite.
_MOST = 1e18
#: Longest message in characters: names of layers come from files.
_LONGEST = 300


class LayerError(InvalidInputError):
    """An invalid profile.

    Attributes:
        layers: names of the faulty layers, so that a reader of files can name their lines.
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
        LayerError: a time or size that is negative, too large or NaN.
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
                    f"layer {self.name}: {field.name} {value:g} is invalid: expected 0-{_MOST:g}",
                    self.name,
                )

    @property
    def compute_s(self) -> float:
        """Seconds of the forward and the backward pass."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """A model as an acyclic, connected graph of layers.

    Attributes:
        layers: at least one; the order breaks ties, the first source is where stages begin.
        edges: (from, to) by name: `to` reads the output of `from`; each pair once.

    Raises:
        LayerError: no layers, a duplicate or unknown name, a cycle, or layers that are not
            connected with the first.
    """

    layers: tuple[Layer, ...]
    edges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise LayerError("the profile has no layers: expected at least one")
        names: set[str] = set()
        for layer in self.layers:
            if layer.name in names:
                raise LayerError(f"duplicate layer {layer.name}", layer.name)
            names.add(layer.name)
        seen_edges: set[tuple[str, str]] = set()
        for edge in self.edges:
            for name in edge:
                if name not in names:
                    pair = " -> ".join(edge)
                    raise LayerError(f"edge {pair}: layer {name!r} does not exist", *edge)
            if edge in seen_edges:
                raise LayerError(f"duplicate edge {edge[0]} -> {edge[1]}", *edge)
            seen_edges.add(edge)
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
        """Return, for each layer, the layers that read its output, as indices in `layers`."""
        index = {layer.name: i for i, layer in enumerate(self.layers)}
        successors_of: list[list[int]] = [[] for _ in self.layers]
        for source, target in self.edges:
            successors_of[index[source]].append(index[target])
        return successors_of

    def topological(self) -> list[int]:
        """Return a topological order as indices in `layers`; ties keep the given order."""
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
        # Predecessors of a layer on a cycle lead back to it: walking backwards, a layer repeats.
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
        raise LayerError(f"layers form a cycle: {' -> '.join(shown)}; remove an edge", *named)

    def _check_connected(self) -> None:
        neighbours: list[list[int]] = [[] for _ in self.layers]
        for i, targets in enumerate(self.successors()):
            for target in targets:
                neighbours[i].append(target)
                neighbours[target].append(i)
        reached, todo = {0}, [0]
        while todo:
            for i in neighbours[todo.pop()]:
                if i not in reached:
                    reached.add(i)
                    todo.append(i)
        for i, layer in enumerate(self.layers):
            if i not in reached:
                raise LayerError(
                    f"layer {layer.name} is not connected with {self.layers[0].name}: "
                    "add the edge that leads to it",
                    layer.name,
                )


def chain(layers: Iterable[Layer]) -> LayerProfile:
    """Return the profile of layers that each read the output of the one before."""
    sequence = tuple(layers)
    return LayerProfile(sequence, tuple((a.name, b.name) for a, b in pairwise(sequence)))
