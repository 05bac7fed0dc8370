"""Texts of the options that a training supports, from hostile senders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.core.execution.supported_options import (
    MAX_STAGES,
    SupportedOptions,
    SupportedOptionsError,
)

options = st.builds(
    SupportedOptions,
    stages=st.integers(1, MAX_STAGES),
    tensor=st.booleans(),
    shard=st.booleans(),
    mesh=st.booleans(),
    slices=st.booleans(),
    recompute=st.booleans(),
    recomputable=st.booleans(),
    own_sharding=st.sampled_from([Sharding.NONE, Sharding.OPTIMIZER, Sharding.FULL]),
    own_tensor=st.integers(1, 65536),
)


@given(options)
def test_the_text_of_options_parses_to_equal_options(value):
    assert SupportedOptions.parse(str(value)) == value


texts = st.lists(st.sampled_from(["stages=2", "tensor", "", "=", "later"])).map(",".join)


@given(st.text() | texts)
def test_any_text_has_options_or_one_line(text):
    line = ""
    try:
        value = SupportedOptions.parse(text)
    except SupportedOptionsError as error:
        line = str(error)
    else:
        assert SupportedOptions.parse(str(value)) == value
    assert "\n" not in line
    assert len(line) < 1000


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("recompute,shard,tensor,stages=6", "stages=6,tensor,shard,recompute"),
        ("slices,mesh,shard,tensor", "tensor,shard,mesh,slices"),
        ("expert=8,stages=4096,context", "stages=4096"),
        ("later", ""),
        ("own-tensor=2,own-shard=full,recomputable", "recomputable,own-shard=full,own-tensor=2"),
    ],
)
def test_words_have_an_order_and_unknown_ones_are_ignored(text, canonical):
    assert str(SupportedOptions.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("stages", "'stages' is invalid: expected stages=N with N from 2 to 4096"),
        ("stages=1", "'stages=1' is invalid"),
        ("stages=4097", "'stages=4097' is invalid"),
        ("stages=02", "'stages=02' is invalid"),
        ("stages=\u0662", "is invalid: expected words such as"),
        ("tensor=2", "'tensor=2' is invalid: expected tensor without a value"),
        ("own-tensor=1", "'own-tensor=1' is invalid: expected own-tensor=N with N from 2 to 65536"),
        ("own-shard=offload", "expected own-shard=full or own-shard=optimizer"),
        ("tensor,tensor", "tensor is given twice; leave one out"),
        ("tensor,", "'' is invalid: expected words such as"),
        ("tensor, shard", "' shard' is invalid"),
        ("tensor\n", "'tensor\\n' is invalid"),
        ("later,x=", "'x=' is invalid"),
        ("a" * 129, "expected at most 128 characters"),
    ],
)
def test_what_is_malformed_is_named(text, line):
    with pytest.raises(SupportedOptionsError) as caught:
        SupportedOptions.parse(text)
    assert line in str(caught.value)


@pytest.mark.parametrize("stages", [0, -1, MAX_STAGES + 1])
def test_numbers_out_of_range_are_refused(stages):
    with pytest.raises(SupportedOptionsError, match="stages is invalid"):
        SupportedOptions(stages=stages)
