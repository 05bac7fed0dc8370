"""Profile of a model's layers, measured while it trains, for the partitioner.

A layer's forward pass ends with its output: one hook on each layer. Its backward pass lasts from
the gradient of its output to that of its input: one hook on each boundary's tensor ends the layer
above and begins the one below. Hooks change nothing, and are removed after `STEPS` steps: medians
do not get better with more.

Models are a chain of layers: the entries of an `nn.Sequential` (which `init` makes of a list), or
a module's children if each is called once, in the order of their definition, on nothing but the
former's output or what is computed from it. Computing between two children belongs to the second.
Other models have no profile. Times are those of one micro-batch on one rank, gradient
synchronisation excluded.

A rank of a pipeline measures the layers it holds; `merge` combines the parts.

>>> from slurm_elastic.core.layers import Layer
>>> part = MeasuredLayers(8, (Layer("fc", 0.002, 0.004, 320, 2048),))
>>> part.at(16).layers[0].forward_s
0.004
>>> MeasuredLayers.restored(part.state()) == part
True
>>> merge([part], ["conv", "fc"]) is None
True
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.core.layers import Layer, LayerProfile, chain
from slurm_elastic.models.pipedream.profile_reader import as_json
from slurm_elastic.training.measure.step_times import Stamp, between, stamp

#: Steps before the first that is measured: they allocate.
SKIPPED = 3
#: Steps that are measured.
STEPS = 10
#: Longest path back through the graph from a layer's input to the former's output.
_FARTHEST = 100

#: Names and modules in their order.
Layers = Sequence[tuple[str, torch.nn.Module]]


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """Measured times and sizes of layers.

    Attributes:
        micro_batch: samples that they are of.
        layers: in order.
    """

    micro_batch: int
    layers: tuple[Layer, ...]

    def at(self, samples: int) -> LayerProfile:
        """Return the profile for another number of samples: times and activations in proportion."""
        factor = samples / self.micro_batch
        return chain(
            Layer(
                layer.name,
                layer.forward_s * factor,
                layer.backward_s * factor,
                layer.activation_bytes * factor,
                layer.parameter_bytes,
                layer.description,
            )
            for layer in self.layers
        )

    def rows(self) -> list[list[Any]]:
        """Return the rows of a report."""
        return [
            [x.name, x.forward_s, x.backward_s, x.activation_bytes, x.parameter_bytes]
            for x in self.layers
        ]

    def state(self) -> dict[str, Any]:
        """Return JSON values: those that `selastic partition` reads, and the micro-batch."""
        return {**as_json(chain(self.layers)), "micro_batch": self.micro_batch}

    @classmethod
    def restored(cls, state: object) -> MeasuredLayers | None:
        """Return the layers of a state that `state` returned; None if it is something else."""
        if not isinstance(state, Mapping):
            return None
        try:
            layers = tuple(
                Layer(
                    str(row["name"]),
                    float(row["forward_s"]),
                    float(row["backward_s"]),
                    float(row["activation_bytes"]),
                    float(row["parameter_bytes"]),
                    str(row.get("description", "")),
                )
                for row in state["layers"]
            )
            micro_batch = int(state["micro_batch"])
            chain(layers)
        except (LookupError, TypeError, ValueError):
            return None
        return cls(micro_batch, layers) if micro_batch > 0 else None


def merge(parts: Iterable[MeasuredLayers], names: Sequence[str]) -> MeasuredLayers | None:
    """Merge the profiles of several ranks into one.

    Args:
        parts: in any order; a layer that several of them have gets the medians of its times.
        names: all layers of the model, in their order.

    Returns:
        At the largest micro-batch of the parts; None: a layer is missing.
    """
    parts = list(parts)
    micro_batch = max((part.micro_batch for part in parts), default=0)
    measured: dict[str, list[Layer]] = {}
    for part in parts:
        for layer in part.at(micro_batch).layers:
            measured.setdefault(layer.name, []).append(layer)
    if not names or any(name not in measured for name in names):
        return None
    return MeasuredLayers(
        micro_batch,
        tuple(
            Layer(
                name,
                statistics.median(x.forward_s for x in measured[name]),
                statistics.median(x.backward_s for x in measured[name]),
                measured[name][0].activation_bytes,
                measured[name][0].parameter_bytes,
                measured[name][0].description,
            )
            for name in names
        ),
    )


def layers_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the layers of a model by the prefix of their parameters' names.

    Its children, or those of its only child; in place of an `nn.ModuleList` its entries.
    Empty: there are none, or the model is compiled as a whole.
    """
    children = list(model.named_children())
    prefix = ""
    while len(children) == 1:
        name, only = children[0]
        if name == "_orig_mod":
            return []
        prefix = f"{prefix}{name}."
        children = list(only.named_children())
    layers: list[tuple[str, torch.nn.Module]] = []
    for name, child in children:
        inner = child.named_children() if isinstance(child, torch.nn.ModuleList) else ()
        layers += [(f"{prefix}{name}.{n}", c) for n, c in inner] or [(f"{prefix}{name}", child)]
    return layers


class LayerProfiler:
    """Measurement of the layers that this rank holds, for `STEPS` steps; later ones cost nothing.

    Args:
        layers: consecutive ones of the model, in order.
        device: of the layers.
        earlier: an earlier profile of them, as from a checkpoint; layers that are frozen now keep
            its backward times.
        skipped, steps: steps that are skipped, then measured.

    Attributes:
        measured: the newest profile; None: none yet, or the model is no chain of layers.
        samples: of the micro-batch whose forward pass comes next; None: the first dimension of
            the first layer's input.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        device: torch.device,
        earlier: MeasuredLayers | None = None,
        skipped: int = SKIPPED,
        steps: int = STEPS,
    ) -> None:
        self.measured = earlier
        self.samples: int | None = None
        self._layers = list(layers)
        self._gpu = device.type == "cuda"
        self._begins, self._ends = skipped, skipped + steps
        self._step = 0
        self._hooks: list[Any] = []
        self._passes: list[_Pass] = []
        self._now: _Pass | None = None
        self._chained = False
        self.done = len(self._layers) < 2

    def begin(self, *, on: bool = True) -> None:
        """Begin a step; if not `on`, it does not count."""
        if self.done or not on:
            return
        if self._step == self._begins:
            self._install()
        if self._step == self._ends:
            self.finish()
        self._step += 1

    def finish(self) -> None:
        """Remove the hooks and compute the profile."""
        self.done = True
        for hook in self._hooks:
            hook.remove()
        complete = [p for p in self._passes if p.complete]
        self._hooks, self._passes, self._now = [], [], None
        if complete:
            self.measured = _summary(self._layers, complete, self.measured, gpu=self._gpu)

    def _install(self) -> None:
        first = self._layers[0][1]
        self._hooks = [first.register_forward_pre_hook(self._entered, with_kwargs=True)]
        for at, (_, module) in enumerate(self._layers):
            self._hooks.append(module.register_forward_hook(self._leaving(at)))
            if at:
                self._hooks.append(module.register_forward_pre_hook(self._follows(at)))

    def _entered(self, _module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled() or not self._layers[-1][1].training:
            self._now = None  # an evaluation
            return
        inputs = list(tensors([*args, *kwargs.values()]))
        size = self.samples or (len(inputs[0]) if inputs and inputs[0].dim() else 1)
        self._now = _Pass(size, len(self._layers), self._stamp)
        self._now.forward.append(self._stamp())
        self._passes.append(self._now)
        # On later stages of a pipeline the first layer's backward pass ends with its input's.
        self._now.hook(inputs, -1)

    def _follows(self, at: int) -> Callable[..., None]:
        def hook(_module: Any, args: tuple[Any, ...]) -> None:
            # Layers called in another order, or on other inputs, are no chain; one pass is checked.
            if self._now is None or self._chained:
                return
            inputs = list(tensors(args))
            if len(self._now.sizes) != at or not _descends(inputs, self._now.last):
                self._give_up()

        return hook

    def _leaving(self, at: int) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, output: Any) -> None:
            if self._now is None:
                return
            if len(self._now.sizes) != at:
                self._give_up()
                return
            self._now.leave(list(tensors([output])), self._stamp())
            if at == len(self._layers) - 1:
                self._now.last = []
                self._now, self._chained = None, True

        return hook

    def _give_up(self) -> None:
        self._passes = []
        self.finish()

    def _stamp(self) -> Stamp:
        return stamp(gpu=self._gpu)


class _Pass:
    """Times of one micro-batch's forward and backward pass through the layers."""

    def __init__(self, samples: int, layers: int, now: Callable[[], Stamp]) -> None:
        self.samples = samples
        self.forward: list[Stamp] = []
        self.sizes: list[int] = []
        #: Time of the gradient of each layer's output; at -1 the end of the backward pass.
        self.backward: dict[int, Stamp] = {}
        self.last: list[torch.Tensor] = []
        self._layers = layers
        self._now = now

    @property
    def complete(self) -> bool:
        """Whether both passes are done."""
        return len(self.sizes) == self._layers and -1 in self.backward

    def leave(self, outputs: list[torch.Tensor], at: Stamp) -> None:
        """Record the output of a layer."""
        self.forward.append(at)
        self.sizes.append(sum(t.numel() * t.element_size() for t in outputs))
        self.last = outputs
        self.hook(outputs, len(self.sizes) - 1)

    def hook(self, boundary: list[torch.Tensor], at: int) -> None:
        """Record the time at which the gradients of these tensors are computed."""
        differentiable = [t for t in boundary if t.requires_grad]
        if not differentiable:
            return

        def record(_gradient: Any) -> None:
            if at == self._layers - 1:
                # Autograd calls it when the whole backward pass has ended.
                torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001
            self.backward[at] = self._now()

        if len(differentiable) == 1:
            differentiable[0].register_hook(record)
        else:
            torch.autograd.graph.register_multi_grad_hook(differentiable, record)

    def _end(self) -> None:
        self.backward.setdefault(-1, self._now())


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors within tuples, lists and dictionaries."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)
        elif isinstance(value, Mapping):
            yield from tensors(value.values())


def _descends(inputs: list[torch.Tensor], former: list[torch.Tensor]) -> bool:
    """Return whether inputs are these outputs, or computed from one by a chain of operations."""
    former_ids = {id(t) for t in former}
    if inputs and all(id(t) in former_ids for t in inputs):
        return True
    if len(inputs) != 1 or len(former) != 1:
        return False
    origin, node = former[0].grad_fn, inputs[0].grad_fn
    if origin is None:
        return node is None  # frozen, or the first layer: there is no graph
    for _ in range(_FARTHEST):
        if node is origin:
            return True
        sources = [n for n, _ in node.next_functions if n is not None] if node else []
        if len(sources) != 1:
            return False
        node = sources[0]
    return False


def _summary(
    layers: Layers, passes: list[_Pass], earlier: MeasuredLayers | None, *, gpu: bool
) -> MeasuredLayers:
    """Return medians over the passes of the most frequent size; of equally frequent the larger."""
    if gpu:
        torch.cuda.synchronize()
    counts = Counter(p.samples for p in passes)
    size = max(counts, key=lambda s: (counts[s], s))
    passes = [p for p in passes if p.samples == size]
    earlier_layers = {x.name: x for x in earlier.at(size).layers} if earlier else {}
    measured = []
    for at, (name, module) in enumerate(layers):
        backward = [s for p in passes if (s := _backward_s(p, at)) is not None]
        frozen = not backward and name in earlier_layers
        measured.append(
            Layer(
                name,
                statistics.median(between(p.forward[at], p.forward[at + 1]) for p in passes),
                earlier_layers[name].backward_s if frozen else statistics.median(backward or [0.0]),
                passes[0].sizes[at],
                sum(p.numel() * p.element_size() for p in module.parameters()),
                type(module).__name__,
            )
        )
    return MeasuredLayers(size, tuple(measured))


def _backward_s(one_pass: _Pass, at: int) -> float | None:
    """Return the backward time of layer `at`; None: no gradient went through it."""
    if at not in one_pass.backward:
        return None
    below = max((b for b in one_pass.backward if b < at), default=-1)
    return max(0.0, between(one_pass.backward[at], one_pass.backward[below]))
