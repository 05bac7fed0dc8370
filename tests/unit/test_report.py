"""Reports and orders from hostile senders."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.report import Orders, Report, ReportError

GOOD = {"job_id": 7, "run": 0, "phase": "training"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    st.dictionaries(st.sampled_from(list(Report.__dataclass_fields__)), json_values), json_values
)
def test_whatever_comes_is_a_report_or_one_line(fields, anything):
    for data in ({**GOOD, **fields}, anything):
        for kind in (Report, Orders):
            try:
                value = kind.from_wire(data)
            except ReportError:
                continue
            assert kind.from_wire(json.loads(json.dumps(value.to_wire()))) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_time_s", float("nan")),
        ("step_time_s", float("inf")),
        ("step_time_s", -1),
        ("progress", 1.5),
        ("job_id", "7"),
        ("job_id", True),
        ("phase", "dancing"),
        ("phase", "train\ning"),
        ("gpu_type", "a" * 300),
        ("proven", 1),
        ("run", 0.5),
        ("micro_batch", 0.5),
        ("micro_step_s", float("nan")),
        ("accumulation", -1),
        ("grad_sqr", float("inf")),
        ("grad_var", float("nan")),
        ("application", "net\x1b[31m"),
    ],
)
def test_lies_are_named(field, value):
    with pytest.raises(ReportError) as caught:
        Report.from_wire({**GOOD, field: value})
    assert caught.value.field == field


def test_newer_senders_are_understood():
    assert Report.from_wire({**GOOD, "mood": "fine"}).job_id == 7


def test_unknown_orders_are_refused():
    with pytest.raises(ReportError, match="explode"):
        Orders.from_wire({"action": "explode"})
