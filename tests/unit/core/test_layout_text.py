"""The text of a layout."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.layout import LayoutText, LayoutTextError


@pytest.mark.parametrize(
    ("text", "replicas", "chunks", "canonical"),
    [
        ("4x1", (4,), 1, "4x1"),
        ("1x3", (1, 1, 1), 1, "1x3"),
        ("2x2", (2, 2), 1, "2x2"),
        ("1x2x2", (1, 1), 2, "1x2x2"),
        ("2x2x1", (2, 2), 1, "2x2"),
        ("2-1", (2, 1), 1, "2-1"),
        ("2-2", (2, 2), 1, "2x2"),
        ("3-3-3", (3, 3, 3), 1, "3x3"),
    ],
)
def test_forms_of_stages(text, replicas, chunks, canonical):
    layout = LayoutText.parse(text)
    assert (layout.replicas, layout.chunks, str(layout)) == (replicas, chunks, canonical)
    assert layout.world == sum(replicas)


@pytest.mark.parametrize(
    ("text", "replicas", "space", "canonical"),
    [("2x1s4", 2, 4, "2x1s4"), ("3x1s1", 3, 1, "3x1"), ("1x1x1s2", 1, 2, "1x1s2")],
)
def test_spatial_groups(text, replicas, space, canonical):
    layout = LayoutText.parse(text)
    assert (layout.replicas, layout.space, str(layout)) == ((replicas,), space, canonical)
    assert layout.world == replicas * space


@pytest.mark.parametrize(
    "text",
    [
        *("1x2s2", "2x1s0", "2x1s", "2-1s2", "1x1x2s2", "65536x1s2", "2s2"),
        *(
            "",
            "4",
            "0x2",
            "2x0",
            "x2",
            "2x",
            "2x2x",
            "1x2x2x2",
            "2-",
            "-2",
            "2-0",
            "2-1x2",
            "2 x 2",
        ),
        *("2X2", "+2x2", "02x2", "²x2", "٢x2", "2x2\n", "auto", "99999x1", "1x99999", "1x600x2"),
        *("256x257", "-".join(["1"] * 5000), "9" * 5000 + "x1"),
    ],
)
def test_anything_else_is_one_line(text):
    with pytest.raises(LayoutTextError) as caught:
        LayoutText.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 160


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.integers(1, 4))
def test_what_is_written_is_read(replicas, chunks):
    layout = LayoutText(tuple(replicas), chunks if len(set(replicas)) == 1 else 1)
    assert LayoutText.parse(str(layout)) == layout


def test_chunks_need_equal_stages():
    with pytest.raises(LayoutTextError, match="2-1"):
        LayoutText((2, 1), 2)
