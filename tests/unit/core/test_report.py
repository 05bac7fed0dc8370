"""Reports and orders from hostile senders."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.member_orders import CompanionComment, MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.core.report_fields import ReportError
from slurm_elastic.rpc.protocol import MAX_REQUEST

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
        ("rehearsal", 3),
        ("rehearsal", "a" * 300),
        ("kept_in", "/data\n"),
        ("kept_bytes", -1),
        ("run", 0.5),
        ("micro_batch", 0.5),
        ("micro_step_s", float("nan")),
        ("accumulation", -1),
        ("grad_sqr", float("inf")),
        ("grad_var", float("nan")),
        ("application", "net\x1b[31m"),
        ("layout", "4"),
        ("layout", "2x0"),
        ("layout", 4),
        ("supported_options", "stages=1"),
        ("supported_options", "tensor,tensor"),
        ("supported_options", 3),
        ("layers", -1),
        ("frozen", 0.5),
        ("certified", "3"),
        ("penalty", 1.5),
        ("certified_penalty", float("nan")),
        ("data_s", -0.1),
        ("forward_s", float("inf")),
        ("backward_s", "1"),
        ("sync_s", 1e9),
        ("optimizer_s", True),
        ("peak_memory_bytes", 0.5),
        ("profile_batch", -8),
        ("profile", {"a": 1}),
        ("profile", [["a", 1, 1, 1]]),
        ("profile", [["", 1, 1, 1, 1]]),
        ("profile", [["a" * 101, 1, 1, 1, 1]]),
        ("profile", [["a\x1b[2J", 1, 1, 1, 1]]),
        ("profile", [["a", 1, 1, 1, 1], ["a", 1, 1, 1, 1]]),
        ("profile", [["a", -1, 1, 1, 1]]),
        ("profile", [["a", 1, float("nan"), 1, 1]]),
        ("profile", [["a", 1, 1, float("inf"), 1]]),
        ("profile", [["a", 1, 1, 1, 1e16]]),
        ("profile", [["a", 1, 1, 1, True]]),
        ("profile", [[f"{i}", 1, 1, 1, 1] for i in range(1001)]),
        ("profile", [[f"{i:0100}", 1, 1, 1, 1] for i in range(900)]),
        ("in_place", 1),
        ("not_in_place", "stages\n"),
        ("change", -1),
        ("change_state", 3),
        ("change_reason", "\x1b[2J"),
        ("change_reason", 7),
        ("change_reason", {"code": "companion-late"}),
        ("change_reason", {"code": "companion-late", "parameters": {"job": "\x1b[2J"}}),
        ("change_reason", {"code": "companion-late", "parameters": {"job": ["4712"]}}),
        ("change_reason", {"code": "companion-late", "parameters": {"user": "bob"}}),
        ("change_reason", {"code": "companion-exited", "parameters": {"exit_code": -1}}),
        ("change_reason", {"code": "sbatch-failed", "parameters": {"error": "a" * 201}}),
        ("generation", 0.5),
        ("micro_batches", 0.5),
        ("micro_batches", -1),
        ("pause_s", float("nan")),
        ("companions", {"4711": 2}),
        ("companions", [[4711, 2]]),
        ("companions", [["4711", 2, "joined"]]),
        ("companions", [[0, 2, "joined"]]),
        ("companions", [[4711, True, "joined"]]),
        ("companions", [[4711, 2, None]]),
        ("companions", [[4711, 2, "joined"], [4711, 1, "joined"]]),
        ("companions", [[i, 1, "joined"] for i in range(1, 66)]),
    ],
)
def test_lies_are_named(field, value):
    with pytest.raises(ReportError) as caught:
        Report.from_wire({**GOOD, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [("layout", "2-"), ("layout", 2), ("batch", -1), ("batch", 0.5), ("frozen", "all"),
     ("directive", "x" * 257), ("directive", "1-2\n"),
     ("members", [3]), ("members", {}), ("members", {"change": "3"}),
     ("members", {"change": 3, "join": [0]}), ("members", {"change": 3, "join": [1] * 65}),
     ("members", {"change": 3, "gpu_type": "v100:4 --uid=0"}),
     ("members", {"change": 3, "leave": [7, 7]}), ("members", {"change": 3, "leave": [2**32]}),
     ("members", {"change": 3, "deadline_s": float("nan")}),
     ("members", {"change": 3, "cancel": 1})],
)  # fmt: skip
def test_orders_that_cannot_be_are_named(field, value):
    with pytest.raises(ReportError) as caught:
        Orders.from_wire({field: value})
    assert caught.value.field == field


def test_older_senders_leave_everything_to_the_job():
    orders = Orders.from_wire({"seq": 3, "action": "run", "report_every_s": 10.0, "reason": ""})
    assert (orders.layout, orders.batch, orders.frozen, orders.directive) == ("", None, None, "")
    report = Report.from_wire(GOOD)
    assert (report.layout, report.frozen, report.profile) == ("", None, ())


def test_a_profile_travels_in_six_digits_and_once():
    rows = [["conv", 0.0123456789, 1 / 3, 4096.4, 10**15]]
    report = Report.from_wire({**GOOD, "profile": rows, "profile_batch": 8})
    assert report.profile == (("conv", 0.0123457, 0.333333, 4096, 10**15),)
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report
    assert "profile" not in Report.from_wire(GOOD).to_wire()


@given(st.text(max_size=100), st.floats(0, 1e6), st.floats(0, 1e15))
@settings(max_examples=30)
def test_the_largest_report_fits_into_a_request(text, seconds, size):
    name = "".join(c for c in text if c.isprintable())[:90]
    wide = "\U0001f600" * 200
    rows = [[f"{name}{i}", seconds, seconds, size, size] for i in range(1000)]
    while True:
        try:
            report = Report.from_wire(
                {
                    **GOOD,
                    "profile": rows,
                    "application": wide,
                    "gpu_type": wide,
                    "layout": "1x2",
                    "companions": [[2**32 - i, 1024, "submitted"] for i in range(1, 65)],
                    "change_reason": {"code": "sbatch-failed", "parameters": {"error": wide}},
                }
            )
        except ReportError as error:
            if error.field != "profile":
                raise
            rows = rows[: len(rows) * 9 // 10]
        else:
            break
    assert rows
    message = {"v": 1, "op": "report", "report": report.to_wire()}
    assert len(json.dumps(message, separators=(",", ":"))) + 4096 < MAX_REQUEST


def test_newer_senders_are_understood():
    assert Report.from_wire({**GOOD, "mood": "fine"}).job_id == 7


def test_what_ranks_read_and_send_travels_and_older_launchers_report_none():
    assert (Report.from_wire(GOOD).read_bytes_s, Report.from_wire(GOOD).exchange_bytes) == (
        None,
    ) * 2
    fields = {"read_bytes_s": 1.5e8, "exchange_bytes": 10**9, "gpu_busy": 0.9}
    fields |= {"gpu_memory_busy": 0.25, "memory_bytes_s": 2e9}
    report = Report.from_wire({**GOOD, **fields})
    assert {k: report.to_wire()[k] for k in fields} == fields
    older = {k: v for k, v in report.to_wire().items() if k not in fields}
    assert Report.from_wire(older) == Report.from_wire(GOOD)


@pytest.mark.parametrize(
    "field", ["read_bytes_s", "memory_bytes_s", "exchange_bytes", "gpu_busy", "gpu_memory_busy"]
)
@pytest.mark.parametrize("value", [-1, 2**64, float("nan"), float("inf"), "9", True, [1]])
def test_reads_and_exchanges_out_of_bounds_are_refused(field, value):
    with pytest.raises(ReportError) as error:
        Report.from_wire({**GOOD, field: value})
    assert error.value.field == field


def test_the_reason_of_a_change_travels():
    reason = Reason("companion-exited", job="4712", exit_code=3)
    report = Report.from_wire({**GOOD, "change_reason": reason.to_json()})
    assert report.change_reason == reason
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report


@pytest.mark.parametrize(
    "reason", [{"code": "companion-exited", "parameters": {"exit_code": 1}}, "it has not joined"]
)
def test_a_reason_that_was_read_can_be_sent_and_read_again(reason):
    report = Report.from_wire({**GOOD, "change_reason": reason})
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report


def test_sentences_of_older_launchers_and_codes_of_newer_ones_are_texts():
    sentence = "companion 4712: it has not joined by the deadline"
    older = Report.from_wire({**GOOD, "change_problem": sentence})
    assert older.change_reason == Reason("text", text=sentence)
    assert Report.from_wire({**GOOD, "change_problem": ""}).change_reason is None
    unknown = {"code": "companion-bored", "parameters": {"job": "4712"}}
    newer = Report.from_wire({**GOOD, "change_reason": unknown})
    assert newer.change_reason == Reason("text", text="companion-bored")


def test_supported_options_travel_and_older_libraries_send_none():
    text = "stages=6,tensor,shard,recompute"
    report = Report.from_wire({**GOOD, "supported_options": text})
    assert report.supported_options == text
    assert Report.from_wire(json.loads(json.dumps(report.to_wire()))) == report
    assert Report.from_wire({**GOOD, "supported_options": "expert=8"}).supported_options
    assert Report.from_wire(GOOD).supported_options == ""


def test_a_state_of_a_rehearsal_that_is_not_known_is_none():
    wire = {**Report(job_id=7, run=0, phase="training").to_wire(), "rehearsal": "half-done"}
    assert Report.from_wire(wire).rehearsal == ""


def test_unknown_orders_are_refused():
    with pytest.raises(ReportError, match="explode"):
        Orders.from_wire({"action": "explode"})


def test_a_state_of_a_newer_launcher_is_none():
    wire = {**GOOD, "change_state": "folding", "companions": [[4711, 2, "sleeping"]]}
    report = Report.from_wire(wire)
    assert (report.change_state, report.companions) == ("", ((4711, 2, ""),))


def test_orders_for_members_travel():
    members = MemberOrders(change=7, join=(2, 1), gpu_type="v100", leave=(4711,), cancel=True)
    orders = Orders(seq=3, members=members)
    assert Orders.from_wire(json.loads(json.dumps(orders.to_wire()))) == orders
    newer = {"change": 7, "join": [2], "mood": "fine"}
    assert Orders.from_wire({"members": newer}).members == MemberOrders(change=7, join=(2,))


def test_the_code_of_a_reason_travels_and_one_of_a_newer_controller_is_text():
    orders = Orders(reason="8 is its MAX", reason_code=Reason("holds-max", gpus=8))
    assert Orders.from_wire(json.loads(json.dumps(orders.to_wire()))) == orders
    newer = Orders.from_wire({"reason_code": {"code": "of-tomorrow", "parameters": {}}})
    assert newer.reason_code is not None
    assert newer.reason_code.code == "text"


def test_the_comment_of_a_companion():
    comment = CompanionComment(base=4711, run=2, change=9)
    assert CompanionComment.parse(str(comment)) == comment
    assert CompanionComment.parse(f"{comment} and more") == comment
    for text in ("", "elastic:2-8", "selastic:companion:4711:0", "selastic:companion:4711:0:-1"):
        assert CompanionComment.parse(text) is None
