"""Transfer of a training's whole state from one rank to others, without a file.

The sender broadcasts a description first: names, types and shapes of the tensors, and the plain
values. The receivers write large tensors where the training uses them, if they fit there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

#: Tensors up to this size travel together: each broadcast costs up to some milliseconds on a busy
#: machine, copying a tensor of this size less.
_SMALL_BYTES = 4 << 20
_CHUNK_BYTES = 32 << 20
#: Values that are packed for a checkpoint travel with the description.
_PACKED = "blob."
#: Bytes of the first broadcast: the length of the description, and as much of it as fits.
_FIRST_BYTES = 1 << 16
_LENGTH_BYTES = 8

#: Broadcast of one tensor, in place on the receivers; returns when it has ended.
Broadcast = Callable[[torch.Tensor], None]
#: Name, type, shape and type of device of a tensor.
Row = tuple[str, str, list[int], str]


def describe(flat: Mapping[str, torch.Tensor]) -> list[Row]:
    """Return the forms of the tensors that are not packed values, as JSON can hold them."""
    return [
        (name, str(t.dtype)[6:], list(t.shape), t.device.type)
        for name, t in flat.items()
        if not name.startswith(_PACKED)
    ]


def reserve(rows: Sequence[Row], live: Container[str]) -> dict[str, torch.Tensor]:
    """Return memory for the large tensors that are not live yet, so that receiving is quick."""
    reserved = {}
    for name, kind, shape, device in rows:
        dtype = getattr(torch, kind)
        if name not in live and _count(shape) * dtype.itemsize > _SMALL_BYTES:
            # Written once: the system provides memory only then.
            reserved[name] = torch.empty(shape, dtype=dtype, device=device).fill_(0)
    return reserved


def send_state(
    broadcast: Broadcast, flat: Mapping[str, torch.Tensor], values: Any, device: torch.device
) -> None:
    """Send tensors by name, and JSON values.

    Args:
        broadcast: from this rank.
        flat: of `TrainingState.gather`.
        values: anything that JSON can hold.
        device: device of the broadcasts.
    """
    packed = {name: t for name, t in flat.items() if name.startswith(_PACKED)}
    rows = describe(flat)
    sizes = {name: t.numel() for name, t in packed.items()}
    text = json.dumps({"rows": rows, "values": values, "packed": sizes}).encode()
    described = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    body = torch.cat([torch.frombuffer(bytearray(described), dtype=torch.uint8), *packed.values()])
    whole = torch.cat([_as_bytes(body.numel()), body])
    first = torch.zeros(_FIRST_BYTES, dtype=torch.uint8)
    first[: min(_FIRST_BYTES, whole.numel())] = whole[:_FIRST_BYTES]
    broadcast(first.to(device))
    if whole.numel() > _FIRST_BYTES:
        broadcast(whole[_FIRST_BYTES:].to(device))
    for chunk in _chunks(rows):
        tensors = [flat[name] for name, *_ in chunk]
        if len(tensors) == 1:
            together = tensors[0].contiguous().to(device)
        else:
            together = torch.cat([t.reshape(-1).to(device) for t in tensors])
        if together.numel():
            broadcast(together)


def receive_state(
    broadcast: Broadcast, live: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[dict[str, torch.Tensor], Any]:
    """Receive what `send_state` sends.

    Args:
        broadcast: from the sender.
        live: tensors to write to, by name; those of another form are passed over.
        device: device of the broadcasts.

    Returns:
        Tensors by name, and the values.
    """
    first = torch.empty(_FIRST_BYTES, dtype=torch.uint8, device=device)
    broadcast(first)
    body = first[_LENGTH_BYTES:].cpu()
    missing = _as_number(first[:_LENGTH_BYTES]) - body.numel()
    if missing > 0:
        rest = torch.empty(missing, dtype=torch.uint8, device=device)
        broadcast(rest)
        body = torch.cat([body, rest.cpu()])
    start = _LENGTH_BYTES + _as_number(body[:_LENGTH_BYTES])
    described = json.loads(bytes(body[_LENGTH_BYTES:start].numpy()))
    flat: dict[str, torch.Tensor] = {}
    for name, size in described["packed"].items():
        flat[name] = body[start : start + size]
        start += size
    for chunk in _chunks(described["rows"]):
        dtype = getattr(torch, chunk[0][1])
        if len(chunk) == 1:
            name, _, shape, kind = chunk[0]
            tensor = _target(live.get(name), dtype, shape, device)
            if tensor.numel():
                broadcast(tensor)
            flat[name] = tensor.to(kind)
            continue
        sizes = [_count(shape) for _, _, shape, _ in chunk]
        together = torch.empty(sum(sizes), dtype=dtype, device=device)
        if together.numel():
            broadcast(together)
        for (name, _, shape, kind), part in zip(chunk, together.split(sizes), strict=True):
            flat[name] = part.reshape(shape).to(kind, copy=True)
    return flat, described["values"]


def _chunks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield what is broadcast together: tensors of one type up to `_CHUNK_BYTES`, or a large one.

    The same on all ranks.
    """
    open_chunks: dict[str, tuple[list[Row], int]] = {}
    for row in rows:
        _, dtype, shape, _ = row
        size = _count(shape) * getattr(torch, dtype).itemsize
        if size > _SMALL_BYTES:
            yield [row]
            continue
        chunk, used = open_chunks.get(dtype, ([], 0))
        if used + size > _CHUNK_BYTES:
            yield chunk
            chunk, used = [], 0
        open_chunks[dtype] = ([*chunk, row], used + size)
    yield from (chunk for chunk, _ in open_chunks.values() if chunk)


def _target(
    live: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    if (
        live is not None
        and live.dtype == dtype
        and list(live.shape) == list(shape)
        and live.device.type == device.type
        and live.is_contiguous()
    ):
        return live.detach()
    return torch.empty(shape, dtype=dtype, device=device)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _as_bytes(number: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(_LENGTH_BYTES, "little")), dtype=torch.uint8)


def _as_number(tensor: torch.Tensor) -> int:
    return int.from_bytes(bytes(tensor.cpu().numpy()), "little")
