"""Reasons of all codes: JSON and log lines come back, hidden jobs go, everything else stays."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.cli.reason_text import sentence, text
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.reason_definition import ParameterKind
from tests.support.decisions.reason_strategies import reasons

OWN, STRANGE = ("4711", "4712_3", "4713_[1-9%2]"), ("8", "15", "9000_1")
REASONS = reasons(st.sampled_from([*OWN, *STRANGE]), st.sampled_from(["alice", "bob"]))


def leaves(reason):
    """Kind and value of each parameter, nested ones included."""
    for parameter in reason.definition.parameters:
        value = reason.parameters[parameter.name]
        if isinstance(value, Reason):
            yield from leaves(value)
        elif parameter.kind is ParameterKind.REASONS:
            for inner in value or ():
                yield from leaves(inner)
        else:
            yield parameter.kind, value


@given(REASONS)
def test_json_comes_back_and_every_code_has_a_sentence(reason):
    assert Reason.from_json(reason.to_json()) == reason
    assert isinstance(text(reason.to_json()), str)


@given(REASONS)
def test_log_lines_come_back_but_for_digits(reason):
    line = str(reason)
    assert line.isprintable()
    found = Reason.from_log(line)
    assert found.code == reason.code
    for (kind, one), (_, other) in zip(leaves(reason), leaves(found), strict=True):
        if isinstance(one, float):
            assert abs(other - one) <= 1e-5 * abs(one) + 1
        else:
            assert (one or None, kind) == (other or None, kind)


@given(REASONS)
def test_only_what_names_a_hidden_job_is_hidden(reason):
    hidden = reason.hidden(job=OWN.__contains__, user=lambda name: name == "alice")
    assert hidden.code == reason.code
    for (kind, before), (_, after) in zip(leaves(reason), leaves(hidden), strict=True):
        if kind is ParameterKind.JOB:
            assert after == (before if before in OWN else None)
        elif kind is ParameterKind.USER:
            assert after == (before if before == "alice" else None)
        elif kind is ParameterKind.JOBS:
            assert after == (before and tuple(j if j in OWN else None for j in before))
        elif kind is ParameterKind.USERS:
            assert after == (before and tuple(u if u == "alice" else None for u in before))
        elif kind is ParameterKind.SENTENCE:
            assert after is None
        else:
            assert after == before
    assert sentence(hidden) is not None
