"""The page docs/reasons.md, from the registry of codes."""

from __future__ import annotations

from collections.abc import Iterator

from contrib.generate.definitions import TEMPLATES
from slurm_elastic.core.reasons.reason_codes import AREAS
from slurm_elastic.core.reasons.reason_definition import Parameter, ParameterKind


def page() -> str:
    """Return the text of docs/reasons.md."""
    template = (TEMPLATES / "reasons.md").read_text("utf-8")
    return template.replace("@reasons\n", "\n".join(_areas()))


def _areas() -> Iterator[str]:
    for area, definitions in AREAS.items():
        yield f"## {area}\n\n| code | meaning | parameters |\n|---|---|---|"
        for definition in definitions:
            parameters = "; ".join(map(_parameter, definition.parameters))
            yield f"| `{definition.code}` | {definition.meaning} | {parameters} |"
        yield ""


def _parameter(parameter: Parameter) -> str:
    kind = parameter.kind.value
    if parameter.kind is ParameterKind.WORD:
        kind = " or ".join(f'"{choice}"' for choice in parameter.choices)
    unit = parameter.unit
    details = [kind, unit if unit not in kind + parameter.meaning else ""]
    if parameter.optional:
        details.append("or null")
    return f"`{parameter.name}` ({', '.join(d for d in details if d)}): {parameter.meaning}"
