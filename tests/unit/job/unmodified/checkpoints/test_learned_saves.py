"""What is kept of a script's saves, and what is left out."""

import json
from typing import Any

import pytest

from slurm_elastic.job.unmodified.checkpoints.learned_saves import (
    LearnedSaves,
    SaveFiles,
    learned_saves,
    select,
)

FILES = SaveFiles(
    shape=(("/d/optimizer#.pt", 1), ("/d/step_#", 2)),
    counting_fields=frozenset({0, 2}),
    contents={"/d/step_#": (("a", 1), ("rank#", 4))},
)


def through_json(learned: list[LearnedSaves]) -> list[LearnedSaves]:
    return learned_saves(json.loads(json.dumps([row.to_body() for row in learned])))


def test_it_is_the_same_after_a_restart() -> None:
    row = LearnedSaves(pattern="*.pt", complete="{}.ok", pause_s=2.5, files={"4x2": FILES})
    plain = LearnedSaves(pattern="*.pt", files={"1x1": SaveFiles(shape=(("a", 1),))})
    assert through_json([row, plain]) == [row, plain]


@pytest.mark.parametrize(
    "change",
    [
        {"pause_s": "hostile"},
        {"pause_s": float("nan")},
        {"pause_s": -1},
        {"pattern": None},
        {"complete": 3},
        {"files": []},
        {"files": {"1x1": {}}},
        {"files": {"1x1": {"shape": [["a", -1]], "counting": None, "contents": {}}}},
        {"files": {"1x1": {"shape": [["a"]], "counting": None, "contents": {}}}},
        {"files": {"1x1": {"shape": [], "counting": [True], "contents": {}}}},
        {"files": {"1x1": {"shape": [], "counting": None, "contents": {"d": [[1, 2]]}}}},
    ],
)
def test_what_is_invalid_is_left_out(change: dict[str, Any]) -> None:
    good = LearnedSaves(pattern="*.pt", files={"4x2": FILES})
    assert learned_saves([{**good.to_body(), **change}, good.to_body()]) == [good]


@pytest.mark.parametrize("body", [None, 5, "x", {"pattern": "*.pt"}, [5], [{}]])
def test_what_is_no_list_of_them_is_nothing(body: object) -> None:
    assert learned_saves(body) == []


def test_each_pattern_and_marker_has_its_own_and_the_oldest_is_forgotten() -> None:
    learned: list[LearnedSaves] = []
    first = select(learned, "a", None)
    assert select(learned, "a", "DONE") is not first
    assert select(learned, "a", None) is first
    for number in range(7):
        select(learned, str(number), None)
    assert len(learned) == 8
    assert learned[0] is first


def test_a_script_with_too_many_names_is_learned_anew() -> None:
    row = LearnedSaves(pattern="*")
    row.record("1x1", FILES)
    names = tuple((f"file{chr(97 + n % 26)}{n}", 1) for n in range(1001))
    row.record("1x1", SaveFiles(shape=names))
    assert row.files == {}
