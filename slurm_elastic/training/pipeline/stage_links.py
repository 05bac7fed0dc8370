"""What travels between neighbouring stages: activations forward, gradients back.

Shapes are told once: the first value of each size of micro-batch is preceded by its
form, later ones are not. Nobody waits to send. The next value is asked for as soon as
the former has come, so that it travels while the rank computes.

Each direction of each boundary between two stages has a process group of its own: on
one NCCL communicator an activation on its way could wait for a gradient that waits
for it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed as dist

from slurm_elastic.training.pipeline.stage_layout import LayoutError


class LinkError(RuntimeError):
    """Another rank did not send, receive or add up; one line, names it."""


class TensorForm(NamedTuple):
    """What a value between stages is made of.

    Attributes:
        single: one tensor that stands for itself, not in a tuple.
        parts: of each tensor its type, shape and whether a gradient comes back for it.
    """

    single: bool
    parts: tuple[tuple[str, tuple[int, ...], bool], ...]

    @classmethod
    def of(cls, value: Any) -> TensorForm:
        """The form of a tensor or a tuple of tensors.

        Raises:
            LayoutError: something else.
        """
        tensors = value if isinstance(value, tuple) else (value,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise LayoutError(
                    f"a stage gives {type(tensor).__name__}; between stages only tensors and "
                    "tuples of tensors can travel: cut elsewhere"
                )
        return cls(
            isinstance(value, torch.Tensor),
            tuple((str(t.dtype)[6:], tuple(t.shape), bool(t.requires_grad)) for t in tensors),
        )

    @property
    def gradients(self) -> tuple[tuple[str, tuple[int, ...], bool], ...]:
        """The parts whose gradients come back."""
        return tuple(part for part in self.parts if part[2])


class NextLink(Protocol):
    """The link to a replica of the following stage."""

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """Before the first of so many micro-batches, whose sizes these are."""

    def send(self, micro: int, value: Any) -> None:
        """A stage's output; does not wait."""

    def gradients(self, micro: int) -> list[torch.Tensor]:
        """Of those parts of the output that asked for one."""


class PreviousLink(Protocol):
    """The link to a replica of the stage before."""

    def begin(self, sizes: Sequence[Hashable]) -> None:
        """Before the first of so many micro-batches, whose sizes these are."""

    def receive(self, micro: int) -> Any:
        """The input of a stage: leaves that ask for a gradient where the output did."""

    def send_back(self, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """Of those parts of the input that ask for one; does not wait."""

    def settle(self, micro: int) -> None:
        """What was sent back up to this micro-batch has certainly arrived."""


@contextlib.contextmanager
def link_errors(what: str) -> Iterator[None]:
    """Failures of torch's collectives become one line.

    Raises:
        LinkError: a peer is gone, or the group's timeout has passed.
    """
    try:
        yield
    except LinkError:
        raise
    except RuntimeError as error:
        text = (str(error).strip().splitlines() or ["no reason given"])[0]
        # Where in gloo's source it happened, and its advice, are of no use to the reader.
        reason = re.sub(r"^(\[[^\]]*\.(cc|cpp|h):\d+\] )+", "", text).split(". This is ")[0]
        raise LinkError(f"rank {dist.get_rank()} failed {what}: {reason}") from error


class _Sender:
    """Tensors on their way to one peer; kept until they have certainly arrived."""

    def __init__(self, group: Any, peer: int) -> None:
        self._group, self._peer = group, peer
        self._sent: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def send(self, micro: int, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            with link_errors(f"sending micro-batch {micro} to rank {self._peer}"):
                work = dist.isend(whole, self._peer, group=self._group)
            self._sent.setdefault(micro, []).append((work, whole))

    def settle(self, micro: int) -> None:
        for key in [k for k in self._sent if k <= micro]:
            for work, _ in self._sent.pop(key):
                with link_errors(f"sending micro-batch {key} to rank {self._peer}"):
                    work.wait()

    def settle_all(self) -> None:
        self.settle(max(self._sent, default=-1))


class _Receiver:
    """Tensors from one peer, in the order in which it sends them."""

    def __init__(self, group: Any, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        self._asked: dict[int, list[tuple[Any, torch.Tensor]]] = {}

    def ask(self, micro: int, parts: Sequence[tuple[str, tuple[int, ...], bool]]) -> None:
        if micro in self._asked:
            return
        self._asked[micro] = []
        for dtype, shape, _ in parts:
            room = torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)
            with link_errors(f"waiting for micro-batch {micro} from rank {self._peer}"):
                self._asked[micro].append((dist.irecv(room, self._peer, group=self._group), room))

    def take(self, micro: int) -> list[torch.Tensor]:
        taken = []
        for work, room in self._asked.pop(micro):
            with link_errors(f"waiting for micro-batch {micro} from rank {self._peer}"):
                work.wait()
            taken.append(room)
        return taken

    def bytes(self, micro: int) -> bytes:
        """A message of any length, at once."""
        self.ask(micro, [("int64", (1,), False)])
        (length,) = self.take(micro)
        self.ask(micro, [("uint8", (int(length.item()),), False)])
        (text,) = self.take(micro)
        return bytes(text.tolist())


class NextRank:
    """`NextLink` on another rank.

    Args:
        peer: that rank.
        groups: of activations and of gradients.
        stride: micro-batches from one that takes this link to the next one that does.
        device: where tensors live.
    """

    def __init__(
        self, peer: int, *, groups: tuple[Any, Any], stride: int, device: torch.device
    ) -> None:
        self._out = _Sender(groups[0], peer)
        self._back = _Receiver(groups[1], peer, device)
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
                f"micro-batch {micro} has another form than those before it: {form.parts} after "
                f"{self._forms[size].parts}; tell micro-batches apart with sizes=, and make a "
                "new engine when layers freeze"
            )
        self._out.send(micro, value if isinstance(value, tuple) else [value])

    def gradients(self, micro: int) -> list[torch.Tensor]:
        """See `NextLink`."""
        self._back.ask(micro, self._forms[self._sizes[micro]].gradients)
        taken = self._back.take(micro)
        # Whoever sent a gradient back has the activation. Without gradients this waits until
        # the next stage takes it, which keeps a frozen stage from running far ahead.
        self._out.settle(micro)
        later = micro + self._stride
        if later < len(self._sizes) and self._sizes[later] in self._forms:
            self._back.ask(later, self._forms[self._sizes[later]].gradients)
        return taken


class PreviousRank:
    """`PreviousLink` on another rank; arguments as for `NextRank`."""

    def __init__(
        self, peer: int, *, groups: tuple[Any, Any], stride: int, device: torch.device
    ) -> None:
        self._in = _Receiver(groups[0], peer, device)
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
        taken = [
            tensor.requires_grad_(wanted)
            for tensor, (_, _, wanted) in zip(self._in.take(micro), form.parts, strict=True)
        ]
        later = micro + self._stride
        if later < len(self._sizes) and self._sizes[later] in self._forms:
            self._in.ask(later, self._forms[self._sizes[later]].parts)
        return taken[0] if form.single else tuple(taken)

    def send_back(self, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """See `PreviousLink`."""
        self._out.send(micro, gradients)

    def settle(self, micro: int) -> None:
        """See `PreviousLink`."""
        self._out.settle(micro)


class SameRank:
    """`NextLink` and `PreviousLink` of two stages on one rank: nothing travels."""

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
