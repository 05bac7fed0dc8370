"""Compare JSON with the TypedDict that describes it."""

import types
import typing


def mismatches(value, expected, where="answer"):
    """Return one line for each place where a JSON value is not what the annotation says."""
    if expected is typing.Any:
        return []
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if typing.is_typeddict(expected):
        return _of_fields(value, expected, where)
    if origin in (typing.Union, types.UnionType):
        found = [mismatches(value, one, where) for one in arguments]
        return [] if [] in found else min(found, key=len)
    if origin is typing.Literal:
        return [] if value in arguments else [f"{where}: {value!r} is none of {arguments}"]
    kind = origin or expected
    if kind is float and type(value) is int:
        return []
    if type(value) is not kind:
        return [f"{where}: {value!r:.60} is not {expected}"]
    if kind is list:
        return [m for i, v in enumerate(value) for m in mismatches(v, *arguments, f"{where}[{i}]")]
    if kind is dict:
        pairs = value.items()
        return [m for k, v in pairs for m in mismatches(v, arguments[1], f"{where}.{k}")]
    return []


def _of_fields(value, expected, where):
    if not isinstance(value, dict):
        return [f"{where}: {value!r:.60} is no {expected.__name__}"]
    # Of postponed annotations `__required_keys__` does not know NotRequired.
    hints = typing.get_type_hints(expected, include_extras=True)
    optional = {k for k, v in hints.items() if typing.get_origin(v) is typing.NotRequired}
    hints = typing.get_type_hints(expected)
    required = expected.__required_keys__ - optional
    found = [f"{where}: {k} is missing" for k in required - value.keys()]
    found += [f"{where}: {k} is not in {expected.__name__}" for k in value.keys() - hints.keys()]
    for name in sorted(value.keys() & hints.keys()):
        found += mismatches(value[name], hints[name], f"{where}.{name}")
    return found
