"""Constraints to features of nodes; what Slurm makes of each was seen by `srun --test-only`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.feature_expression import FeatureExpression, alternatives

NODES = {
    "g01": {"a100", "rack1"},
    "g03": {"v100", "rack1"},
    "g04": {"a100", "rack2"},
    "g05": {"v100", "rack2"},
}
ANY = "g01 g03 g04 g05"


def nodes_of(text: str) -> str | None:
    """Return the nodes that fulfil an expression; None if there is none."""
    expression = FeatureExpression.parse(text)
    if expression is None:
        return None
    return " ".join(name for name, features in NODES.items() if expression.matches(features))


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ANY),
        ("a100", "g01 g04"),
        ("a100,rack2", "g04"),
        ("v100|a100&rack2", "g04 g05"),
        ("a100&rack1|v100", "g01 g03 g05"),
        ("v100|(a100&rack2)", "g03 g04 g05"),
        ("(a100|v100)&rack2", "g04 g05"),
        ("rack1&(a100|rack2)", "g01"),
        (" (a100) ", "g01 g04"),
        ("((a100|v100)&rack2)|rack1", None),  # Slurm refuses it
        ("a100||v100", None),
        ("a100*2", None),
        ("[rack1|rack2]", None),
        ("a&" * 600 + "a", None),
    ],
)
def test_nodes_that_slurm_takes(text, nodes):
    assert nodes_of(text) == nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a100", ["a100"]),
        ("[rack1|rack2]", ["rack1", "rack2"]),
        ("(a100|v100)&[rack1|rack2]", ["(a100|v100)&rack1", "(a100|v100)&rack2"]),
        ("[a100|a100]", ["a100"]),
        ("[a100*2&v100*1]", ["[a100*2&v100*1]"]),
        ("[(a100&rack1)|v100]", ["[(a100&rack1)|v100]"]),
        ("[a|b]&[c|d]", ["[a|b]&[c|d]"]),
        (f"[{'|'.join(map(str, range(40)))}]", [f"[{'|'.join(map(str, range(40)))}]"]),
    ],
)
def test_alternatives(text, expected):
    assert list(alternatives(text)) == expected


@given(st.text("ab1&|,()[]* ", max_size=30))
def test_any_text_is_an_expression_or_none(text):
    for alternative in alternatives(text):
        expression = FeatureExpression.parse(alternative)
        assert expression is None or expression.matches({"a"}) in (True, False)
