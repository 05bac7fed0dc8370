"""The page docs/reasons.md, from the registry of codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from contrib.generate.definitions import TEMPLATES
from slurm_elastic.core.reasons.reason_codes import AREAS, DEFINITIONS
from slurm_elastic.core.reasons.reason_definition import Parameter, ParameterKind

#: Parameters of at least so many reasons are described once.
_COMMON = 3


def page() -> str:
    """Return the text of docs/reasons.md."""
    template = (TEMPLATES / "reasons.md").read_text("utf-8")
    uses = Counter(p for d in DEFINITIONS.values() for p in d.parameters)
    common = {parameter for parameter, count in uses.items() if count >= _COMMON}
    rows = (f"| `{p.name}` | {_kind(p)} | {p.meaning} |" for p in uses if p in common)
    template = template.replace("@common\n", "".join(f"{row}\n" for row in rows))
    return template.replace("@reasons\n", "\n".join(_areas(common)))


def _areas(common: Set[Parameter]) -> Iterator[str]:
    for area, definitions in AREAS.items():
        yield f"## {area}\n\n| code | meaning | parameters |\n|---|---|---|"
        for definition in definitions:
            parameters = "; ".join(
                f"`{p.name}`" if p in common else f"`{p.name}` ({_kind(p)}): {p.meaning}"
                for p in definition.parameters
            )
            yield f"| `{definition.code}` | {definition.meaning} | {parameters} |"
        yield ""


def _kind(parameter: Parameter) -> str:
    kind = parameter.kind.value
    if parameter.kind is ParameterKind.WORD:
        kind = " or ".join(f'"{choice}"' for choice in parameter.choices)
    unit = parameter.unit
    details = [kind, unit if unit not in kind + parameter.meaning else ""]
    if parameter.optional:
        details.append("or null")
    return ", ".join(d for d in details if d)
