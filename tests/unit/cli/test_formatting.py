import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.cli import formatting


def test_examples():
    assert doctest.testmod(formatting).failed == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.034, "0.034 s"), (2, "2 s"), (2.14, "2.1 s"), (9.96, "10 s"), (60, "1 min"),
     (3599, "59 min 59 s"), (3600, "1 h"), (86400 + 3600, "1 d 1 h")],
)  # fmt: skip
def test_seconds_in_words(seconds, text):
    assert formatting.span(seconds) == text


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_digits_never_fails(value):
    assert formatting.digits(value)


@given(st.text())
def test_clean_text_is_printable_and_keeps_its_length(text):
    assert formatting.clean(text).isprintable()
    assert len(formatting.clean(text)) == len(text)


def test_progress_is_100_only_when_done():
    assert [formatting.percent(p) for p in (None, 0.0, 0.999, 1.0)] == ["-", "0%", "99%", "100%"]


def test_clock_shows_the_day_when_it_is_not_today():
    assert formatting.clock(0.0, now=60.0) == "00:00:00"
    assert formatting.clock(0.0, now=1e6) == "1970-01-01T00:00:00"


@pytest.mark.parametrize(
    ("text", "when"),
    [("now", 1e6), ("now-1hour", 1e6 - 3600), ("now-2days", 1e6 - 172800), ("today", 950400.0),
     ("1970-01-02", 86400.0), ("1970-01-01T01:00", 3600.0), ("1970-01-01T00:00:09", 9.0)],
)  # fmt: skip
def test_parse_time(text, when):
    assert formatting.parse_time(text, 1e6) == when


def test_parse_time_names_the_forms():
    with pytest.raises(ValueError, match="a time such as now-2days"):
        formatting.parse_time("yesterday", 0.0)


def test_places():
    where = [{"switch": "rack1", "nodes": ["g01", "g02"]}, {"switch": "", "nodes": ["x9"]}]
    assert formatting.places(where) == "rack1:g[01-02],x9"
    assert formatting.spelled(where) == "g01, g02 (rack1); x9"
