"""Numbers of a training in files of `torch.save`: step, epoch and learning rate.

The instructions of the pickle are listed, never executed: the file is a user's, and may contain
anything.
"""

from __future__ import annotations

import os
import pickletools
import stat
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

#: Files of a checkpoint with the state of a scheduler: of accelerate, and of transformers.
_SCHEDULERS = ("scheduler.bin", "scheduler.pt")
#: Larger files are not read; that of a scheduler has some kilobytes.
_MAX_SCHEDULER = 1 << 20
#: Larger pickles of a whole checkpoint are not read, which takes 0.7 s for each MiB (our choice).
#: Tensors are not in the pickle: one of 1,000 parameters and their optimizer's state has 330 kB.
_MAX_PICKLE = 1 << 20
_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    RuntimeError,
    EOFError,
    BadZipFile,
    zlib.error,
)

#: Keys of a checkpoint that count the steps of the whole training. Not `step` and `iter`, which
#: some scripts count anew in each epoch; `iteration` only beside no epoch.
_STEPS = ("global_step", "global_steps", "iter_num", "num_updates")
_EPOCH, _ITERATION = "epoch", "iteration"
#: The same in mmengine's `meta`.
_META, _META_STEP = "meta", "iter"
#: In the state of a scheduler and of an optimizer.
_LAST_EPOCH, _LAST_RATE, _GROUPS, _RATE = "last_epoch", "_last_lr", "param_groups", "lr"
_SOUGHT = tuple(
    key.encode() for key in (*_STEPS, _EPOCH, _ITERATION, _META_STEP, _LAST_RATE, _RATE)
)

_VALUES = frozenset(
    (
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("BINBYTES", "SHORT_BINBYTES"),
    )
)
_MEMO_WRITES = frozenset(("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"))
_MEMO_READS = frozenset(("BINGET", "LONG_BINGET", "GET"))
#: Instructions that add something to the object below it on the stack.
_ADDING = frozenset(("SETITEM", "SETITEMS", "APPEND", "APPENDS", "BUILD"))
_MARK = object()


class _Function(NamedTuple):
    """Function or type that a pickle names."""

    name: str


class SavedNumbers(NamedTuple):
    """Numbers of a training in one checkpoint; None: it does not have that one.

    Attributes:
        step: of the optimizer, since the beginning of the training.
        epoch: as the script counts it.
        rate: learning rate of the first group of parameters.
    """

    step: int | None = None
    epoch: int | None = None
    rate: float | None = None


def read_rate(checkpoint: str) -> float | None:
    """Return the learning rate of the first group of parameters; None if there is none.

    Args:
        checkpoint: directory in which `torch.save` has written a scheduler's `state_dict`.
    """
    for name in _SCHEDULERS:
        try:
            data = _pickle(f"{checkpoint}/{name}", most=_MAX_SCHEDULER, largest=_MAX_SCHEDULER)
            rate = _last_rate(_outline(data))
        except _ERRORS:
            continue
        if rate is not None:
            return rate
    return None


def read_numbers(path: str) -> SavedNumbers:
    """Return the numbers in a checkpoint of one file, a dictionary that `torch.save` has written.

    Args:
        path: of the file.
    """
    try:
        data = _pickle(path, most=_MAX_PICKLE)
        if not any(key in data for key in _SOUGHT):
            return SavedNumbers()
        return _numbers(_outline(data))
    except _ERRORS:
        return SavedNumbers()


def _pickle(path: str, *, most: int, largest: int | None = None) -> bytes:
    """Return the pickled object in a file of `torch.save`.

    Args:
        path: of the file.
        most: bytes of the object.
        largest: bytes of the file; None: of any size.

    Raises:
        OSError, ValueError, LookupError, RuntimeError, EOFError, BadZipFile, zlib.error: there is
            none.
    """
    # O_NONBLOCK: opening a FIFO must not wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or (largest is not None and status.st_size > largest):
            raise ValueError("it is no file of torch.save")
        with ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if archive.getinfo(names[0]).file_size > most:
                raise ValueError("it is too large")
            return archive.read(names[0])


def _outline(data: bytes) -> object:
    """Return texts, numbers, dictionaries, lists and short tuples of a pickle; {} for all else.

    Numbers of numpy are among them.

    Raises:
        ValueError, LookupError: it is no pickle.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for code, argument, _ in pickletools.genops(data):
        if code.name == "STOP":
            return stack.pop()
        if code.name in _MEMO_WRITES:
            number = len(memo) if argument is None else int(argument)
            memo[number] = stack[-1]
        elif code.name in _MEMO_READS:
            stack.append(memo[int(argument or 0)])
        elif code.name in _VALUES:
            stack.append(argument)
        else:
            operands = _operands(stack, code)
            if code.name in _ADDING:
                _add(stack[-1], operands, code.name)
            else:
                stack += _results(code, argument, operands)
    raise ValueError("it has no end")


def _operands(stack: list[Any], code: pickletools.OpcodeInfo) -> list[Any]:
    """Take from a stack what an instruction takes; not the object to which it adds something."""
    if pickletools.markobject in code.stack_before:
        at = len(stack) - 1
        while at >= 0 and stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise ValueError("there is no mark")
        operands = stack[at + 1 :]
    else:
        at = len(stack) - len(code.stack_before) + (code.name in _ADDING)
        operands = stack[at:]
    del stack[at:]
    return operands


def _results(code: pickletools.OpcodeInfo, argument: object, operands: list[Any]) -> list[Any]:
    """Return what an instruction puts on the stack."""
    match code.name:
        case "MARK":
            return [_MARK]
        case "EMPTY_LIST":
            return [[]]
        case "GLOBAL" | "STACK_GLOBAL":
            return [_Function(str(argument) if argument else " ".join(operands))]
        case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
            return [tuple(operands)]
        case "REDUCE":
            return [_result(*operands)]
    return [{} for _ in code.stack_after]


def _result(function: object, arguments: object) -> object:
    """Return what a function makes of arguments: a number of numpy, or its parts; else {}."""
    if not isinstance(function, _Function) or not isinstance(arguments, tuple):
        return {}
    module, _, name = function.name.partition(" ")
    match name, arguments:
        case "encode", (str(text), "latin1") if module == "_codecs":
            return text.encode("latin1")
        case "dtype", (str(kind), *_) if module == "numpy":
            return _Function(kind)
        case "scalar", (_Function(name="f8"), bytes(data)) if len(data) == 8:
            return struct.unpack("<d", data)[0]
    return {}


def _add(target: object, items: list[Any], name: str) -> None:
    """Add items to a dictionary or list."""
    if name.startswith("SETITEM") and isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if isinstance(key, str))
    elif name.startswith("APPEND") and isinstance(target, list):
        target += items


def _numbers(saved: object) -> SavedNumbers:
    """Return what a checkpoint says."""
    if not isinstance(saved, dict):
        return SavedNumbers()
    meta = saved.get(_META)
    meta = meta if isinstance(meta, dict) else {}
    steps = (*(saved.get(name) for name in _STEPS), meta.get(_META_STEP))
    step = next((number for value in steps if (number := _count(value)) is not None), None)
    epoch = _count(saved.get(_EPOCH, meta.get(_EPOCH)))
    if step is None and epoch is None:
        step = _count(saved.get(_ITERATION))
    rate = None
    for state in _states(saved, "opt"):
        groups = state.get(_GROUPS)
        first = groups[0] if isinstance(groups, list) and groups else None
        if isinstance(first, dict) and isinstance(first.get(_RATE), float):
            rate = first[_RATE]
            break
    for state in _states(saved, "sched"):
        rate = _last_rate(state) if rate is None else rate
        scheduled = _count(state.get(_LAST_EPOCH))
        # Else the scheduler counts epochs.
        if step is None and epoch is not None and scheduled is not None and scheduled > epoch + 1:
            step = scheduled
    return SavedNumbers(step, epoch, rate)


def _states(saved: dict[str, Any], word: str) -> Iterator[dict[str, Any]]:
    """Yield the states, alone or in a list, under keys that contain a word."""
    for key, value in saved.items():
        if word in key:
            for state in value if isinstance(value, list) else (value,):
                if isinstance(state, dict):
                    yield state


def _last_rate(scheduler: object) -> float | None:
    """Return the learning rate in the state of a scheduler; None if there is none."""
    rates = scheduler.get(_LAST_RATE) if isinstance(scheduler, dict) else None
    first = rates[0] if isinstance(rates, list) and rates else None
    return first if isinstance(first, float) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None
