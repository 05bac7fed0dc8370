"""The directive's Python reader, against the examples that all three readers share."""

import contextlib
import doctest
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core import directive as module
from slurm_elastic.core import directive_grammar
from slurm_elastic.core.directive import Directive, DirectiveError
from tests.support.directives import DIRECTIVES, octets


def text_of(row: dict[str, Any]) -> str:
    return octets(row).decode("utf-8", "surrogateescape")


def tupled(value: Any) -> Any:
    return tuple(tupled(item) for item in value) if isinstance(value, list) else value


@pytest.mark.parametrize("row", DIRECTIVES["valid"], ids=lambda row: text_of(row)[:60])
def test_valid(row):
    directive = Directive.parse(row["text"])
    expected = {name: tupled(value) for name, value in row["fields"].items()}
    assert directive == Directive(**expected)
    for name, value in expected.items():
        assert getattr(directive, name) == value
    assert str(directive) == row.get("canonical", row["text"])
    assert Directive.parse(str(directive)) == directive
    for gpu_type, sizes in row.get("sizes", {}).items():
        assert list(directive.sizes(gpu_type)) == sizes
    if "start" in row:
        gpus, gpu_type = row["start"]
        assert directive.start() == (gpus, gpu_type or None)


@pytest.mark.parametrize("row", DIRECTIVES["invalid"], ids=lambda row: repr(row)[:60])
def test_invalid(row):
    with pytest.raises(DirectiveError) as caught:
        Directive.parse(text_of(row))
    assert caught.value.reason == row["reason"]
    assert caught.value.part == row["part"]
    assert caught.value.text == text_of(row)
    assert str(caught.value).isprintable()
    assert str(caught.value).startswith("--elastic=")


def test_the_table_is_worth_its_name():
    assert len(DIRECTIVES["valid"]) >= 30
    assert len(DIRECTIVES["invalid"]) >= 60


def test_message_names_directive_and_remedy():
    with pytest.raises(DirectiveError) as caught:
        Directive.parse("16-2")
    assert str(caught.value) == "--elastic=16-2: MIN 16 is larger than MAX 2; write 2-16"


def test_message_hides_control_characters():
    with pytest.raises(DirectiveError) as caught:
        Directive.parse("2\x1b[2J")
    assert str(caught.value).startswith("--elastic=2?[2J: byte 0x1b ")


def test_values_built_in_code_follow_the_same_grammar():
    with pytest.raises(DirectiveError, match="MIN 16 is larger than MAX 2"):
        Directive(16, 2)
    with pytest.raises(DirectiveError, match="is listed twice"):
        Directive(1, 2, types=("a", "a"))
    with pytest.raises(DirectiveError, match="not a multiple of unit 3"):
        Directive(1, 3, unit=3)
    with pytest.raises(DirectiveError, match="sizes: 9 is outside 1-3"):
        Directive(1, 3, listed=(9, 2))
    with pytest.raises(DirectiveError, match="spatial groups have no options"):
        Directive(1, 3, parallel="spatial", plan="auto")


def test_value_is_hashable_and_picklable():
    directive = Directive.parse("2-16,unit=a100:2/v100:8")
    assert pickle.loads(pickle.dumps(directive)) == directive
    assert len({directive, Directive.parse("2-16,unit=a100:2/v100:8")}) == 1


def test_excluded_shapes_are_never_given():
    directive = Directive.parse("2-8,types=a100:v100,unit=a100:2")
    barred = directive.excluding([("a100", 4), ("", 8)]).excluding([("v100", 3)])
    assert list(barred.sizes("a100")) == [2, 6]
    assert list(barred.sizes("v100")) == [2, 4, 5, 6, 7]
    assert not barred.sizes("h100")
    assert [g for g in range(10) if barred.allows(g, "a100")] == [2, 6]
    assert [g for g in range(10) if barred.allows(g, "v100")] == [2, 4, 5, 6, 7]
    assert not barred.regular
    assert str(barred) == str(directive)


def test_excluding_everything_leaves_no_size():
    directive = Directive.parse("2-3").excluding([("", 2), ("", 3)])
    assert not directive.sizes("a100")
    assert not directive.allows(2, "a100")
    assert directive.within("a100", 3, above=0) == 0


def test_directives_without_equal_shapes_are_equal():
    directive = Directive.parse("1-8")
    one = directive.excluding([("a100", 4), ("", 8)])
    other = directive.excluding([("", 8)]).excluding([("a100", 4), ("", 8)])
    assert one == other
    assert hash(one) == hash(other)
    assert one != directive
    assert directive.excluding([]) is directive
    assert pickle.loads(pickle.dumps(one)) == one


def test_bounded_growth_passes_a_size_that_is_excluded():
    directive = Directive.parse("1-8").excluding([("", 2), ("", 3)])
    assert directive.within("a100", 2, above=1) == 4
    assert directive.within("a100", 5, above=1) == 5
    assert directive.within("a100", 16, above=8) == 8


def test_doctest():
    assert doctest.testmod(module).failed == 0


def test_only_the_standard_library():
    code = (
        "import sys, slurm_elastic.core.directive\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    ).stdout.split()
    assert set(loaded) <= {"slurm_elastic", "__main__"}


NAMES = st.from_regex(r"\A[A-Za-z0-9_.-]{1,12}\Z").filter(
    lambda name: not directive_grammar.is_slice(name)
)


@st.composite
def directives(draw: st.DrawFn) -> Directive:
    unit = draw(st.integers(1, 64))
    low = draw(st.integers(1, 100))
    high = draw(st.integers(low, 1000))
    types = tuple(draw(st.lists(NAMES, max_size=4, unique=True)))
    per_type = draw(st.booleans())
    chosen = draw(st.lists(st.sampled_from(types), unique=True)) if types else []
    listed = draw(st.lists(st.integers(low, high), max_size=8, unique=True))
    return Directive(
        low * unit,
        high * unit,
        types=types,
        batch=draw(st.none() | st.tuples(st.integers(1, 999), st.integers(999, 10**9))),
        parallel=draw(st.sampled_from(["data", "pipeline", "hybrid"])),
        freeze=draw(st.sampled_from(["off", "auto"])),
        max_penalty=draw(st.floats(0, 1)),
        notice_s=draw(st.none() | st.integers(1, 86400)),
        unit=None if per_type else unit,
        units=tuple((name, unit) for name in chosen) if per_type else (),
        listed=tuple(size * unit for size in listed),
        in_place=draw(st.sampled_from(["auto", "never"])),
        share=draw(st.sampled_from(["no", "yes"])),
        plan=draw(st.sampled_from(["own", "auto"])),
    )


@given(directives())
def test_round_trip(directive):
    assert Directive.parse(str(directive)) == directive


@given(directives(), NAMES, st.data())
def test_excluded_sizes_are_gone(directive, other, data):
    shapes = st.tuples(st.sampled_from(["", *directive.types, other]), st.integers(1, 200))
    barred = data.draw(st.lists(shapes, max_size=5))
    left = directive.excluding(barred)
    for name in (*directive.types, other):
        gone = {gpus for gpu_type, gpus in barred if gpu_type in ("", name)}
        assert list(left.sizes(name)) == [g for g in directive.sizes(name) if g not in gone]
        assert all(left.allows(g, name) for g in left.sizes(name))
        assert not any(left.allows(g, name) for g in gone)
    assert left.start() == directive.start()


@given(directives(), NAMES)
def test_sizes_are_legal(directive, other):
    for gpu_type in (*directive.types, other):
        sizes = directive.sizes(gpu_type)
        for gpus in sizes:
            assert directive.min_gpus <= gpus <= directive.max_gpus
            assert gpus % directive.unit_for(gpu_type) == 0
            assert directive.allows(gpus, gpu_type)
            assert gpus in directive.listed or not directive.listed
        assert [g for g in range(200) if directive.allows(g, gpu_type)] == [
            g for g in sizes if g < 200
        ]
        assert bool(sizes) == (not directive.types or gpu_type in directive.types)
    gpus, gpu_type = directive.start()
    for name in directive.types if gpu_type is None else (gpu_type,):
        assert directive.allows(gpus, name)


def read_or_refuse(text: str) -> None:
    with contextlib.suppress(DirectiveError):
        directive = Directive.parse(text)
        assert Directive.parse(str(directive)) == directive


@given(st.text(alphabet=st.characters(max_codepoint=0x17F), max_size=40) | st.text(max_size=300))
def test_any_text_is_read_or_refused(text):
    read_or_refuse(text)


@given(st.text(alphabet="0123456789-,=:/.%abtypesunichlmx", max_size=30))
def test_near_misses_are_read_or_refused(tail):
    read_or_refuse("2-16," + tail)


def test_examples_in_the_documentation():
    text = (Path(__file__).parents[3] / "docs" / "directive.md").read_text("utf-8")
    found = re.findall(r"(?:--elastic=|SLURM_ELASTIC=|elastic:)(\d[\w,=:./%-]*)", text)
    assert len(found) > 10
    for directive in {text.rstrip(",.:") for text in found} - {"16-2"}:  # an error's example
        Directive.parse(directive)
