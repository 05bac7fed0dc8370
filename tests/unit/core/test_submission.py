"""The record in AdminComment, and the portable form in Comment."""

import doctest
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core import submission as module
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import (
    Submission,
    SubmissionError,
    parse_admin_comment,
    parse_comment,
)


def record(**changes: object) -> str:
    return json.dumps({"elastic": "2-16", "shape": {}, "v": 1} | changes)


def test_doctest():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "hello",
        "{",
        "{}",
        "[]",
        '{"x":1}',
        '"elastic"',
        '{"v":1,"elastic":"2"}',
        "é\udcff",
    ],
)
def test_not_ours(text):
    assert parse_admin_comment(text) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"elastic"', "AdminComment"),
        ('{"elastic":' + "[" * 5000, "AdminComment"),
        ('{"elastic":"' + "a" * 70000 + '"}', "AdminComment"),
        ('{"elastic":"2-16","v":1}\n', "shape"),
        (record(v=2), "v"),
        (record(v="1"), "v"),
        (record(v=[["x"] * 99]), "v"),
        (record(elastic=2), "elastic"),
        (record(elastic=None), "elastic"),
        (record(elastic="16-2"), "elastic"),
        (record(shape=[]), "shape"),
        (record(shape={"min_nodes": "2"}), "min_nodes"),
        (record(shape={"min_nodes": True}), "min_nodes"),
        (record(shape={"min_nodes": 1.5}), "min_nodes"),
        (record(shape={"min_nodes": 2**60}), "min_nodes"),
        (record(shape={"features": 1}), "features"),
        (record(shape={"features": "→"}), "features"),
        (record(other=1), "other"),
    ],
)
def test_damaged(text, part):
    with pytest.raises(SubmissionError) as caught:
        parse_admin_comment(text)
    assert caught.value.part == part
    assert str(caught.value).startswith(f"{part}: ")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("before", ["", "site"])
def test_text_that_a_tool_of_the_site_adds_after_it_is_kept_apart(before):
    read = parse_admin_comment(record(other=before) + ",JS1:H4sI}\n" + "x" * 70000)
    assert read is not None
    assert str(read.directive) == "2-16"
    assert read.other.startswith(f"{before},JS1:H4sI}}" if before else "JS1:H4sI}")


def test_fields_of_later_releases_are_skipped():
    read = parse_admin_comment(record(shape={"min_nodes": 2, "colour": "red"}, later=1))
    assert read is not None
    assert dict(read.shape) == {"min_nodes": 2}


def test_comment():
    assert parse_comment("elastic:2-16") == Submission(Directive(2, 16))
    assert parse_comment("elastic:2-16,freeze=auto my run") == Submission(
        Directive(2, 16, freeze="auto")
    )
    for text in (None, "", "elastic", "elastic: 2-16", "my elastic:2-16", "elastic:"):
        assert parse_comment(text) is None
    with pytest.raises(SubmissionError, match="MIN 16 is larger than MAX 2; write 2-16"):
        parse_comment("elastic:16-2")


TEXT = st.binary(max_size=40).map(lambda data: data.decode("utf-8", "surrogateescape"))
SHAPES = st.dictionaries(
    st.sampled_from(sorted(module._NUMBERS)), st.integers(-(2**31), 2**33)
) | st.dictionaries(st.sampled_from(sorted(module._STRINGS)), TEXT)


@given(SHAPES, TEXT)
def test_round_trip(shape, other):
    submission = Submission(Directive(2, 16, types=("a100",)), shape, other)
    text = submission.admin_comment()
    assert text.isascii()
    assert "\n" not in text
    assert parse_admin_comment(text) == submission
    assert pickle.loads(pickle.dumps(submission)) == submission
    assert hash(submission) == hash(parse_admin_comment(text))


@given(st.text(max_size=60), st.dictionaries(st.text(max_size=9), st.none() | st.floats() | TEXT))
def test_any_text_is_read_or_refused(tail, fields):
    for text in (tail, '{"elastic"' + tail, '{"elastic":"2-16",' + json.dumps(fields)[1:]):
        try:
            assert parse_admin_comment(text) is None or text.startswith('{"elastic"')
        except SubmissionError:
            assert text.startswith('{"elastic"')
