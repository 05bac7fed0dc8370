"""Hypothesis strategies for reasons of all codes."""

from __future__ import annotations

from hypothesis import strategies as st

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.reason_codes import DEFINITIONS
from slurm_elastic.core.reasons.reason_definition import Parameter, ParameterKind, ReasonDefinition

_NUMBERS = st.floats(0.01, 1e6)
_WORDS = st.text(st.characters(codec="ascii", categories=("L", "N", "P", "Z")), max_size=12)
_VALUES = {
    ParameterKind.COUNT: st.integers(0, 9999),
    ParameterKind.NUMBER: _NUMBERS,
    ParameterKind.FRACTION: _NUMBERS,
    ParameterKind.SECONDS: _NUMBERS,
    ParameterKind.TIME: st.integers(1_500_000_000, 1_900_000_000).map(float),
    ParameterKind.FLAG: st.booleans(),
    ParameterKind.NAME: _WORDS,
    ParameterKind.GPU_TYPE: st.sampled_from(["", "a100", "v100"]),
    ParameterKind.TEXT: _WORDS,
    ParameterKind.SENTENCE: _WORDS,
    ParameterKind.SHAPES: st.lists(st.tuples(st.sampled_from(["", "a100"]), st.integers(1, 64))),
    ParameterKind.NODES: st.lists(st.sampled_from(["g01", "g-2", "n3.site"])),
}


def reasons(
    jobs: st.SearchStrategy[str], users: st.SearchStrategy[str]
) -> st.SearchStrategy[Reason]:
    """Return reasons of any code, nested to some depth.

    Args:
        jobs: ids that people type.
        users: names.
    """
    named = {
        ParameterKind.JOB: jobs,
        ParameterKind.USER: users,
        ParameterKind.JOBS: st.lists(jobs, min_size=2, max_size=2),
        ParameterKind.USERS: st.lists(users, min_size=2, max_size=2),
    }

    def value(parameter: Parameter, inner: st.SearchStrategy[Reason]) -> st.SearchStrategy[object]:
        if parameter.kind is ParameterKind.WORD:
            found: st.SearchStrategy[object] = st.sampled_from(parameter.choices)
        elif parameter.kind is ParameterKind.REASON:
            found = inner
        elif parameter.kind is ParameterKind.REASONS:
            found = st.lists(inner, min_size=1, max_size=3)
        else:
            found = {**_VALUES, **named}[parameter.kind]
        return st.none() | found if parameter.optional else found

    def of(
        definition: ReasonDefinition, inner: st.SearchStrategy[Reason]
    ) -> st.SearchStrategy[Reason]:
        given = {p.name: value(p, inner) for p in definition.parameters}
        return st.fixed_dictionaries(given).map(lambda v: Reason(definition.code, **v))

    def layer(inner: st.SearchStrategy[Reason]) -> st.SearchStrategy[Reason]:
        return st.sampled_from(sorted(DEFINITIONS)).flatmap(lambda c: of(DEFINITIONS[c], inner))

    return layer(layer(st.just(Reason("waits"))))
