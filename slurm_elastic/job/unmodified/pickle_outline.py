"""Plain values of a pickle, without unpickling it.

The instructions of the pickle are listed, never executed, as it may be hostile.

>>> import pickle
>>> outline(pickle.dumps({"epoch": 3, "rates": [0.1], "other": complex(1, 2)}))
{'epoch': 3, 'rates': [0.1], 'other': {}}
"""

from __future__ import annotations

import pickletools
import struct
from typing import Any, NamedTuple

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


class TensorOfOne(NamedTuple):
    """Tensor of torch with one number, which lies beside the pickle.

    Attributes:
        kind: class of its storage, such as `FloatStorage`.
        name: of the storage.
    """

    kind: str
    name: str


class _Function(NamedTuple):
    """Function or type that a pickle names."""

    name: str


class _Outside(NamedTuple):
    """Object that lies beside the pickle."""

    identity: object


def outline(data: bytes) -> object:
    """Return texts, numbers, dictionaries, lists and short tuples of a pickle; {} for all else.

    Numbers of numpy and tensors of one number are among them. Keys of dictionaries are texts and
    whole numbers. An object with attributes, such as `argparse.Namespace`, becomes a dictionary of
    these.

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
    """Return the values that an instruction puts on the stack."""
    match code.name:
        case "MARK":
            return [_MARK]
        case "EMPTY_LIST":
            return [[]]
        case "GLOBAL" | "STACK_GLOBAL":
            return [_Function(str(argument) if argument else " ".join(operands))]
        case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" | "TUPLE":
            return [tuple(operands)]
        case "BINPERSID":
            return [_Outside(*operands)]
        case "REDUCE":
            return [_result(*operands)]
    return [{} for _ in code.stack_after]


def _result(function: object, arguments: object) -> object:
    """Return the result of a function: a number, its parts, a tensor of one; else {}."""
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
        case "_rebuild_tensor_v2", (
            _Outside(identity=("storage", _Function(name=str(kind)), str(storage), *_)),
            0,
            (),
            *_,
        ) if module == "torch._utils":
            return TensorOfOne(kind.rpartition(" ")[2], storage)
    return {}


def _add(target: object, items: list[Any], name: str) -> None:
    """Add items to a dictionary or list."""
    if name.startswith("SETITEM") and isinstance(target, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if isinstance(key, str | int))
    elif name.startswith("APPEND") and isinstance(target, list):
        target += items
    elif name == "BUILD" and isinstance(target, dict) and isinstance(items[0], dict):
        target.update({key: value for key, value in items[0].items() if isinstance(key, str)})
