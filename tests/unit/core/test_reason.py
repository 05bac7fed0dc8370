"""Reasons: codes with checked parameters, in JSON and in log lines."""

import ast
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from slurm_elastic.cli.reason_text import SENTENCES, text, with_texts
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.reason_codes import AREAS, DEFINITIONS

PACKAGE = Path(__file__).parents[3] / "slurm_elastic"


def test_equal_reasons_are_equal_and_hash_alike():
    one = Reason("gpus-kept", gpus=4, gpu_type="a100", nodes=["g1"])
    other = Reason("gpus-kept", nodes=("g1",), gpus=np.int64(4), gpu_type="a100")
    assert one == other
    assert len({one, other, Reason("waits")}) == 2


@pytest.mark.parametrize(
    ("code", "parameters"),
    [
        ("no-such-code", {}),
        ("holds-max", {}),
        ("holds-max", {"gpus": 4, "nodes": 1}),
        ("holds-max", {"gpus": 4.5}),
        ("holds-max", {"gpus": "4"}),
        ("minimum-interval", {"until": math.inf}),
        ("gpus-kept", {"gpus": 4, "gpu_type": "a100", "nodes": "g1"}),
        ("waits-for-nearer-place", {"reason": "a sentence"}),
        ("preempted-by", {"job": "7", "order": "alphabet", "value": 1.0}),
    ],
)
def test_wrong_codes_and_parameters_are_errors(code, parameters):
    with pytest.raises(ValueError, match=r"^reason"):
        Reason(code, **parameters)


def test_a_number_that_is_not_finite_is_not_known():
    reason = Reason(
        "place-too-far", unit="rack", spread=2, nearest=1, speed=0.5, waited_s=1, limit_s=math.inf
    )
    assert reason.parameters["limit_s"] is None
    assert "of any length of time" in text(reason.to_json())


def test_sentences_of_0_1_0_stay_sentences():
    assert Reason.from_json("") is Reason.from_json(None) is None
    assert Reason.from_json("idle GPUs") == Reason("text", text="idle GPUs")
    newer = {"code": "of-tomorrow", "parameters": {"gpus": 4}}
    assert json.loads(Reason.from_json(newer).parameters["text"]) == newer
    assert text("idle GPUs") == "idle GPUs"
    assert text(newer) == "of-tomorrow gpus=4"


def test_a_log_line_names_code_and_parameters():
    inner = Reason("job-came-first", job="4711_[3-9%2]")
    outer = Reason("waits-for-nodes", nodes=["g01", "g02"], reason=inner)
    assert str(outer) == (
        "waits-for-nodes nodes=g01,g02"
        ' reason={"code":"job-came-first","parameters":{"job":"4711_[3-9%2]"}}'
    )
    assert Reason.from_log(str(outer)) == outer
    refused = Reason("slurm-refused", error='it said "no"\nand more')
    assert "\n" not in str(refused)
    assert Reason.from_log(str(refused)) == refused


def test_answers_get_texts_at_every_depth():
    row = Reason("holds-max", gpus=8).to_json()
    said = with_texts({"jobs": [{"why": row, "none": None}]})
    assert said["jobs"][0]["why"] == {**row, "text": "8 is its MAX"}


def test_each_code_is_defined_once_and_has_a_text():
    assert sum(map(len, AREAS.values())) == len(DEFINITIONS)
    assert set(SENTENCES) == set(DEFINITIONS)
    for definition in DEFINITIONS.values():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", definition.code)
        assert definition.meaning.endswith((".", ")"))
        names = [p.name for p in definition.parameters]
        assert len(names) == len(set(names))


def test_each_code_is_given_somewhere_and_by_name():
    given = set()
    for path in PACKAGE.rglob("*.py"):
        if "cli" in path.parts or path.name == "reason.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Reason":
                code = node.args[0]
                assert isinstance(code, ast.Constant), f"{path}:{node.lineno}"
                given.add(code.value)
    given.add("text")  # what a ledger of 0.1.0 and a site's own policy give
    assert given == set(DEFINITIONS)
