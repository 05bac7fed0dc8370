r"""Reader of layer profiles: PipeDream's text, and our JSON.

PipeDream's (SOSP'19, the published profiler): one line per layer, then one per edge::

    node2 -- Conv2d(3, 64) -- forward_compute_time=2.1, backward_compute_time=4.3, \
        activation_size=822083584.0, parameter_size=7168.000
    <TAB>node1 -- node2

Times are milliseconds there, sizes bytes. As the published optimiser does, layers
without predecessors whose description begins with `Input` are left out (data is
where the first stage is), and so are outputs `__getitem__…` that no layer reads.

Ours is JSON (docs/pipeline.md): `{"version": 1, "layers": [{"name", "forward_s",
"backward_s", "activation_bytes", "parameter_bytes", "after": [NAME, …]}]}`.
Without `after` a layer reads the one before it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.core.layers import Layer, LayerError, LayerProfile

#: Fields of a layer in both formats: ours, PipeDream's, and what a unit of PipeDream's is.
_FIELDS = (
    ("forward_s", "forward_compute_time", 1e-3),
    ("backward_s", "backward_compute_time", 1e-3),
    ("activation_bytes", "activation_size", 1.0),
    ("parameter_bytes", "parameter_size", 1.0),
)
_PAIR = re.compile(r"(\w+)=([^,]*)(?:,\s*|$)")
VERSION = 1


class LayerProfileError(InvalidInputError):
    """A profile that cannot be read: file, line and remedy."""

    def __init__(self, text: str) -> None:
        # It repeats what stands in a file, which may be of any length.
        super().__init__(text if len(text) <= 500 else f"{text[:500]}...")


@dataclass(slots=True)
class _Draft:
    """Content of a file before it is checked; lines are those of the file, 0: unknown."""

    layers: dict[str, Layer] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    edge_lines: dict[tuple[str, str], int] = field(default_factory=dict)


def read(path: Path) -> LayerProfile:
    """Return the profile in a file of either format.

    Raises:
        ProfileError: it cannot be read, or is no profile; names file, line and remedy.
    """
    return _parsed(_text(path), str(path))


def read_with_samples(path: Path) -> tuple[LayerProfile, int | None]:
    """Return the profile in a file, and the samples that it is of; None: it does not say.

    `selastic show --profile` writes them as `batch`, checkpoints as `micro_batch`.

    Raises:
        LayerProfileError: as of `read`, or they are no number above 0.
    """
    text = _text(path)
    profile = _parsed(text, str(path))
    data = json.loads(text) if text.lstrip()[:1] == "{" else {}
    for key in ("batch", "micro_batch"):
        if (value := data.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayerProfileError(
                    f"{path}: {key} {value!r} is invalid: expected a whole number above 0"
                )
            return profile, value
    return profile, None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise LayerProfileError(f"{path}: not text: give a layer profile") from None
    except OSError as error:
        raise LayerProfileError(f"{path}: {error.strerror}") from None


def _parsed(text: str, where: str) -> LayerProfile:
    draft = _from_json(text, where) if text.lstrip()[:1] in ("{", "[") else _from_text(text, where)
    try:
        return LayerProfile(tuple(draft.layers.values()), tuple(draft.edges))
    except LayerError as error:
        raise LayerProfileError(f"{where}{_line_of(error, draft)}: {error}") from None


def as_json(profile: LayerProfile) -> dict[str, Any]:
    """Return the profile as our JSON."""
    sources: dict[str, list[str]] = {layer.name: [] for layer in profile.layers}
    for source, target in profile.edges:
        sources[target].append(source)
    rows = []
    for layer in profile.layers:
        row: dict[str, Any] = {"name": layer.name}
        if layer.description:
            row["description"] = layer.description
        row |= {name: getattr(layer, name) for name, _, _ in _FIELDS}
        rows.append(row | {"after": sources[layer.name]})
    return {"version": VERSION, "layers": rows}


def _line_of(error: LayerError, draft: _Draft) -> str:
    pair = error.layers[:2]
    line = draft.edge_lines.get(pair, 0) if len(pair) == 2 else 0
    line = line or next((draft.lines[n] for n in error.layers if draft.lines.get(n)), 0)
    return f":{line}" if line else ""


def _from_text(text: str, where: str) -> _Draft:
    draft = _Draft()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        at = f"{where}:{number}"
        if line[0].isspace():
            ends = _text_edge(line, at)
            if ends not in draft.edge_lines:  # some published files repeat edges
                draft.edges.append(ends)
                draft.edge_lines[ends] = number
            continue
        layer = _text_layer(line, at)
        if layer.name in draft.layers:
            raise LayerProfileError(
                f"{at}: duplicate layer {layer.name}, first at line {draft.lines[layer.name]}"
            )
        draft.layers[layer.name] = layer
        draft.lines[layer.name] = number
    for source, target in draft.edges:
        for name in (source, target):
            if name not in draft.layers:
                line_number = draft.edge_lines[source, target]
                raise LayerProfileError(f"{where}:{line_number}: no layer is named {name}")
    if not draft.layers:
        raise LayerProfileError(f"{where}: empty: a layer profile has a line per layer")
    _leave_out(draft)
    if not draft.layers:
        raise LayerProfileError(f"{where}: nothing but inputs: a profile needs at least one layer")
    return draft


def _text_edge(line: str, at: str) -> tuple[str, str]:
    ends = [part.strip() for part in line.split(" -- ")]
    if len(ends) != 2 or not all(ends):
        raise LayerProfileError(f"{at}: no edge: write <TAB>nodeA -- nodeB")
    if ends[0] == ends[1]:
        raise LayerProfileError(f"{at}: {ends[0]} reads itself: remove this edge")
    return ends[0], ends[1]


def _text_layer(line: str, at: str) -> Layer:
    name, description, rest = _text_parts(line, at)
    texts = {key: value.strip() for key, value in _PAIR.findall(rest)}
    values = {}
    for attribute, label, unit in _FIELDS:
        if label not in texts:
            raise LayerProfileError(f"{at}: {name} has no {label}")
        text = texts[label]
        try:
            # Some published sizes are lists, one per output.
            numbers = [float(n) for n in text.strip("[]").split(";")]
        except ValueError:
            raise LayerProfileError(f"{at}: {label}={text} is no number") from None
        values[attribute] = sum(numbers) * unit
    try:
        return Layer(name, description=description, **values)
    except LayerError as error:
        raise LayerProfileError(f"{at}: {error}") from None


def _text_parts(line: str, at: str) -> tuple[str, str, str]:
    parts = line.split(" -- ")
    if len(parts) > 3 and parts[-1].strip().startswith("stage_id="):
        parts.pop()  # an earlier partition
    if len(parts) < 3 or not parts[0].strip():
        raise LayerProfileError(
            f"{at}: no layer: write NAME -- DESCRIPTION -- forward_compute_time=…, "
            "backward_compute_time=…, activation_size=…, parameter_size=…"
        )
    return parts[0].strip(), " -- ".join(parts[1:-1]).strip(), parts[-1]


def _leave_out(draft: _Draft) -> None:
    """Remove inputs, then outputs that no layer reads; each searched for once, as published."""
    targets = {target for _, target in draft.edges}
    _remove(draft, {
        n for n, layer in draft.layers.items()
        if n not in targets and layer.description.startswith("Input")
    })  # fmt: skip
    sources = {source for source, _ in draft.edges}
    _remove(draft, {
        n for n, layer in draft.layers.items()
        if n not in sources and layer.description.startswith("__getitem__")
    })  # fmt: skip


def _remove(draft: _Draft, names: set[str]) -> None:
    draft.layers = {n: layer for n, layer in draft.layers.items() if n not in names}
    draft.edges = [(a, b) for a, b in draft.edges if a not in names and b not in names]


def _from_json(text: str, where: str) -> _Draft:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise LayerProfileError(f"{where}:{error.lineno}: no JSON: {error.msg}") from None
    except ValueError as error:  # a number of thousands of digits
        raise LayerProfileError(f"{where}: cannot be read: {error}") from None
    except RecursionError:
        raise LayerProfileError(f"{where}: nested too deeply: give a layer profile") from None
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise LayerProfileError(f'{where}: no layer profile: the JSON needs a list "layers"')
    if data.get("version", VERSION) != VERSION:
        raise LayerProfileError(
            f"{where}: version {data['version']!r} is unknown; known: {VERSION}"
        )
    draft = _Draft()
    last: str | None = None
    for i, row in enumerate(data["layers"]):
        at = f"{where}: layers[{i}]"
        layer = _json_layer(row, at)
        if layer.name in draft.layers:
            raise LayerProfileError(f"{at}: duplicate layer {layer.name!r}")
        names = row.get("after", [] if last is None else [last])
        if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            raise LayerProfileError(f'{at}: "after" must be a list of names')
        draft.layers[layer.name] = layer
        draft.edges += [(name, layer.name) for name in names]
        last = layer.name
    return draft


def _json_layer(row: object, at: str) -> Layer:
    if not isinstance(row, dict) or not isinstance(row.get("name"), str) or not row["name"]:
        raise LayerProfileError(f'{at}: a layer is an object with a "name"')
    values: dict[str, float] = {}
    for name, _, _ in _FIELDS:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LayerProfileError(f"{at} ({row['name']}): {name} must be a number")
        try:
            values[name] = float(value)
        except OverflowError:
            raise LayerProfileError(f"{at} ({row['name']}): {name} is too large") from None
    try:
        return Layer(row["name"], description=str(row.get("description", "")), **values)
    except LayerError as error:
        raise LayerProfileError(f"{at}: {error}") from None
