"""Folded node lists."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core import nodelist
from slurm_elastic.core.nodelist import expand, fold

names = st.builds(
    lambda prefix, number, width: f"{prefix}{number:0{width}d}",
    st.sampled_from(["g", "rack1-n", "a"]),
    st.integers(0, 1200),
    st.integers(1, 4),
)


def test_examples_in_the_docs():
    assert doctest.testmod(nodelist).failed == 0


@given(st.sets(names | st.sampled_from(["login", "head"])))
def test_folding_loses_nothing(hosts):
    assert set(expand(fold(hosts))) == hosts


@pytest.mark.parametrize("text", ["", "(null)"])
def test_an_empty_list_has_no_nodes(text):
    assert expand(text) == ()
