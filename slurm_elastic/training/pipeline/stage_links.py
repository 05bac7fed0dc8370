"""Transfers between neighbouring stages: activations forward, gradients back.

Shapes are sent once: the first value of each size of micro-batch is preceded by its
form, later ones are not. Sending does not block. The next value is requested as soon as
the former has arrived, so that the transfer overlaps with computing.

Where ranks share the weights of a stage, all of them have the same values. Each sends its slice to
the rank with the same part in the other stage, whose ranks collect the slices (CoCoNet, ASPLOS'22,
the pipeline boundary): so a value crosses the boundary once, and not once for each rank.

Each direction of each boundary between two stages has its own process group: on one
NCCL communicator an activation could wait for a gradient that waits for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed as dist

from slurm_elastic.training.pipeline.stage_layout import LayoutError
from slurm_elastic.training.ranks.link_errors import LinkError, link_errors
from slurm_elastic.training.ranks.subgroup import Subgroup


class TensorForm(NamedTuple):
    """Types and shapes of a value between stages.

    Attributes:
        single: the value is a tensor, not a tuple.
        parts: for each tensor its type, its shape and whether a gradient comes back for it.
    """

    single: bool
    parts: tuple[tuple[str, tuple[int, ...], bool], ...]

    @classmethod
    def of(cls, value: Any) -> TensorForm:
        """Return the form of a tensor or a tuple of tensors.

        Raises:
            LayoutError: the value is neither.
        """
        tensors = value if isinstance(value, tuple) else (value,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise LayoutError(
                    f"output of a stage: {type(tensor).__name__} is invalid: expected a tensor or "
                    "a tuple of tensors; cut the model elsewhere"
                )
        return cls(
            isinstance(value, torch.Tensor),
            tuple((str(t.dtype)[6:], tuple(t.shape), bool(t.requires_grad)) for t in tensors),
        )

    @property
    def gradients(self) -> tuple[tuple[str, tuple[int, ...], bool], ...]:
        """Parts whose gradients come back."""
        return tuple(part for part in self.parts if part[2])


class NextLink(Protocol):
    """Link to a replica of the next stage."""

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """Prepare for a sequence of micro-batches of these sizes."""

    def send(self, micro: int, value: Any) -> None:
        """Send the stage's output, without waiting."""

    def gradients(self, micro: int) -> list[torch.Tensor]:
        """Return the gradients of those parts of the output that require one."""


class PreviousLink(Protocol):
    """Link to a replica of the previous stage."""

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """Prepare for a sequence of micro-batches of these sizes."""

    def receive(self, micro: int) -> Any:
        """Return the stage's input: leaves that require a gradient where the output did."""

    def send_back(self, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of those parts of the input that require one, without waiting."""

    def settle(self, micro: int) -> None:
        """Free the gradients sent back up to this micro-batch: they have arrived."""


class _Slices:
    """Slices of values that all ranks of a tensor-parallel group have."""

    def __init__(self, group: Subgroup | None) -> None:
        self._group = group if group is not None and group.size > 1 else None

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the slice of this rank, a flat one; or a tensor of fewer elements than ranks.

        Slices are equally long: zeros follow the last elements.
        """
        size = self._slice_size(tensor.numel())
        if size is None:
            return tensor
        assert self._group is not None
        start = self._group.rank * size
        part = tensor.detach().reshape(-1)[start : start + size]
        missing = size - part.numel()
        return torch.cat([part, part.new_zeros(missing)]) if missing else part

    def memory(self, part: tuple[str, tuple[int, ...], bool], device: torch.device) -> torch.Tensor:
        """Return memory for the slice of a tensor of this form."""
        dtype, shape, _ = part
        size = self._slice_size(math.prod(shape))
        return torch.empty(
            shape if size is None else (size,), dtype=getattr(torch, dtype), device=device
        )

    def whole(self, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor of which this rank has received its slice; collective."""
        if part.shape == shape:
            return part
        assert self._group is not None
        slices = self._group.collect(part, "collecting slices of an activation")
        return torch.cat(slices)[: math.prod(shape)].view(shape)

    def _slice_size(self, elements: int) -> int | None:
        """Return the elements of a slice; None: the tensor is sent whole."""
        if self._group is None or elements < self._group.size:
            return None
        return math.ceil(elements / self._group.size)


class _Sender:
    """Tensors being sent to one rank; kept until they have arrived."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, micro: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            contiguous = tensor.detach().contiguous()
            with link_errors(f"sending micro-batch {micro} to rank {self._peer}"):
                work = dist.isend(contiguous, self._peer, group=self._group)
            self._sent.setdefault(micro, []).append((work, contiguous))

    def settle(self, micro: int) -> None:
        for key in [k for k in self._sent if k <= micro]:
            for work, _ in self._sent.pop(key):
                with link_errors(f"sending micro-batch {key} to rank {self._peer}"):
                    work.wait()

    def settle_all(self) -> None:
        self.settle(max(self._sent, default=-1))


class _Receiver:
    """Tensors from one rank, in the order in which it sends them."""

    def __init__(self, group: Any, peer: int, device: torch.device, slices: _Slices) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._slices = slices
        self._requested: dict[int, list[tuple[Any, torch.Tensor, tuple[int, ...]]]] = {}

    def ask(self, micro: int, parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> None:
        """Request tensors of these forms, of which this rank gets its slices."""
        if micro not in self._requested:
            memory = [self._slices.memory(part, self._device) for part in parts]
            self._request(micro, memory, [shape for _, shape, _ in parts])

    def take(self, micro: int) -> list[torch.Tensor]:
        """Wait for the requested parts of a micro-batch, and return them."""
        received = []
        for work, buffer, shape in self._requested.pop(micro):
            with link_errors(f"waiting for micro-batch {micro} from rank {self._peer}"):
                work.wait()
            received.append(self._slices.whole(buffer, shape))
        return received

    def bytes(self, micro: int) -> bytes:
        """Wait for a message of any length and return it."""
        length = torch.empty(1, dtype=torch.int64, device=self._device)
        self._request(micro, [length], [(1,)])
        self.take(micro)
        text = torch.empty(int(length.item()), dtype=torch.uint8, device=self._device)
        self._request(micro, [text], [tuple(text.shape)])
        self.take(micro)
        return bytes(text.tolist())

    def _request(
        self, micro: int, memory: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self._requested[micro] = []
        for buffer, shape in zip(memory, shapes, strict=True):
            with link_errors(f"waiting for micro-batch {micro} from rank {self._peer}"):
                work = dist.irecv(buffer, self._peer, group=self._group)
            self._requested[micro].append((work, buffer, shape))


class NextRank:
    """`NextLink` to another rank.

    Args:
        peer: that rank.
        groups: of activations and of gradients.
        stride: every `stride`-th micro-batch takes this link.
        device: of the tensors.
        tensor_group: ranks that share the weights of this stage; None: this one alone.
    """

    def __init__(
        self,
        peer: int,
        *,
        groups: tuple[Any, Any],
        stride: int,
        device: torch.device,
        tensor_group: Subgroup | None = None,
    ) -> None:
        self._slices = _Slices(tensor_group)
        self._out = _Sender(groups[0], peer)
        self._back = _Receiver(groups[1], peer, device, self._slices)
        self._stride, self._device = stride, device
        self._sizes: Sequence[Hashable] = ()
        self._forms: dict[Hashable, TensorForm] = {}

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """See `NextLink`."""
        self._sizes = sizes

    def send(self, micro: int, value: Any) -> None:
        """See `NextLink`.

        Raises:
            LinkError: the value has another form than the first of this size had.
        """
        form, size = TensorForm.of(value), self._sizes[micro]
        if size not in self._forms:
            self._forms[size] = form
            text = torch.tensor(list(json.dumps(form).encode()), dtype=torch.uint8)
            length = torch.tensor([len(text)])
            self._out.send(micro, [length.to(self._device), text.to(self._device)])
        elif form != self._forms[size]:
            raise LinkError(
                f"micro-batch {micro}: form {form.parts} is invalid: expected "
                f"{self._forms[size].parts} as before; pass sizes= where shapes differ, and make "
                "a new engine when layers freeze"
            )
        tensors = value if isinstance(value, tuple) else [value]
        self._out.send(micro, [self._slices.own(tensor) for tensor in tensors])

    def gradients(self, micro: int) -> list[torch.Tensor]:
        """See `NextLink`."""
        self._back.ask(micro, self._forms[self._sizes[micro]].gradients)
        gradients = self._back.take(micro)
        # A gradient came back, so the activation has arrived. Without gradients this waits until
        # the next stage takes it, so that a frozen stage does not run far ahead.
        self._out.settle(micro)
        later = micro + self._stride
        if later < len(self._sizes) and self._sizes[later] in self._forms:
            self._back.ask(later, self._forms[self._sizes[later]].gradients)
        return gradients


class PreviousRank:
    """`PreviousLink` to another rank; arguments as for `NextRank`."""

    def __init__(
        self,
        peer: int,
        *,
        groups: tuple[Any, Any],
        stride: int,
        device: torch.device,
        tensor_group: Subgroup | None = None,
    ) -> None:
        self._slices = _Slices(tensor_group)
        self._in = _Receiver(groups[0], peer, device, self._slices)
        self._out = _Sender(groups[1], peer)
        self._stride = stride
        self._sizes: Sequence[Hashable] = ()
        self._forms: dict[Hashable, TensorForm] = {}

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """See `PreviousLink`."""
        self._out.settle_all()
        self._sizes = sizes

    def receive(self, micro: int) -> Any:
        """See `PreviousLink`."""
        size = self._sizes[micro]
        if size not in self._forms:
            single, parts = json.loads(self._in.bytes(micro))
            self._forms[size] = TensorForm(
                single, tuple((d, tuple(s), bool(g)) for d, s, g in parts)
            )
        form = self._forms[size]
        self._in.ask(micro, form.parts)
        inputs = [
            tensor.requires_grad_(needs_grad)
            for tensor, (_, _, needs_grad) in zip(self._in.take(micro), form.parts, strict=True)
        ]
        later = micro + self._stride
        if later < len(self._sizes) and self._sizes[later] in self._forms:
            self._in.ask(later, self._forms[self._sizes[later]].parts)
        return inputs[0] if form.single else tuple(inputs)

    def send_back(self, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """See `PreviousLink`."""
        self._out.send(micro, [self._slices.own(gradient) for gradient in gradients])

    def settle(self, micro: int) -> None:
        """See `PreviousLink`."""
        self._out.settle(micro)


class SameRank:
    """`NextLink` and `PreviousLink` of two stages on one rank: nothing is sent."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}
        self._gradients: dict[int, list[torch.Tensor]] = {}

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """See `NextLink`."""

    def send(self, micro: int, value: Any) -> None:
        """See `NextLink`."""
        TensorForm.of(value)
        self._values[micro] = value

    def receive(self, micro: int) -> Any:
        """See `PreviousLink`."""
        value = self._values.pop(micro)
        tensors = value if isinstance(value, tuple) else (value,)
        leaves = tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)
        return leaves if isinstance(value, tuple) else leaves[0]

    def send_back(self, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """See `PreviousLink`."""
        self._gradients[micro] = list(gradients)

    def gradients(self, micro: int) -> list[torch.Tensor]:
        """See `NextLink`."""
        return self._gradients.pop(micro)

    def settle(self, micro: int) -> None:
        """See `PreviousLink`."""
