"""A short part of the fuzzers (`make fuzz`) with fixed inputs, and inputs that once crashed."""

import json
import pwd
import random
import re
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.cli import formatting
from slurm_elastic.config.schema import ConfigError, parse
from slurm_elastic.controller.transitions.orphan_cleanup import pinned_by_us
from slurm_elastic.core.cluster import Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.layers import Layer, LayerError, LayerProfile
from slurm_elastic.core.nodelist import MOST, expand
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.core.report_fields import ReportError
from slurm_elastic.core.submission import Submission
from slurm_elastic.rpc import frames
from slurm_elastic.rpc.requests import build
from slurm_elastic.simulator.workloads import accounting_trace
from slurm_elastic.slurm import gres, limits, shape, slurm_settings, switches
from slurm_elastic.slurm.readers import pyslurm_records
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError
from tests.fuzz import checked_log, files, inbox, jobs, texts
from tests.support.controller import job_records


@pytest.fixture(autouse=True)
def _log():
    checked_log.quiet()
    yield
    checked_log.loud()


@pytest.mark.parametrize(
    ("surface", "count"), [(texts, 3000), (inbox, 2000), (files, 150), (jobs, 30)]
)
def test_hostile_input_is_read_or_refused_in_words(surface, count):
    for number in range(count):
        surface.one(random.Random(f"7.{number}"))


# --- found by them ---


@pytest.mark.parametrize(
    "text", ["g[1-999999999]", "g[0-9999][0-9999]", "g[1-x]", "g[]", "g[1_0]", "g[٤]", "g[3-" + "9" * 5000,
             "x" * 5000 + "[1-2]", ",".join("g[1-1000]" for _ in range(100))],
)  # fmt: skip
def test_a_node_list_cannot_fill_the_memory(text):
    with pytest.raises(ValueError, match="node list"):
        expand(text)


def test_a_node_list_may_be_large_and_separated_as_slurm_allows():
    assert len(expand(f"g[1-{MOST}]")) == MOST
    assert expand("g01 g02\tg03\ng04") == ("g01", "g02", "g03", "g04")


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["step", "step_time_s", "gpus", "progress"])
def test_numbers_beyond_all_bounds_are_refused_in_one_short_line(field, value):
    with pytest.raises(ReportError) as refusal:
        Report.from_wire({"job_id": 1, "run": 0, "phase": "training", field: value})
    assert len(str(refusal.value)) < 120


def test_a_usage_question_about_no_name_or_time_is_malformed():
    there = inbox.place()
    for user in (2**63, ["alice"], "\udc80", "a\nb"):
        reply = there.reply({"v": 1, "op": "usage", "user": user})
        assert reply["code"] == "malformed", user
    for start in (10**400, -(10**400), float("nan"), True):
        reply = there.reply({"v": 1, "op": "usage", "start": start})
        assert reply["code"] == "malformed", start


def test_orders_name_no_hidden_job_and_nothing_that_a_log_cannot_print():
    """A job refuses orders that are not printable, and would miss its notice."""
    there = inbox.ControllerUnderTest()
    outbox = there.controller.engine.outbox
    why = Reason(
        "several",
        reasons=[
            Reason("job-needs-gpus", gpus=4, job="4711", user="alice"),
            Reason("job-came-first", job="4600"),
            Reason("slurm-refused", error="it can\x1b not\u2028be"),
        ],
    )
    outbox.ask(4722, Orders(action="notice", notice=1), run=0, reason=why)
    reply = there.reply({"v": 1, "op": "orders", "job_id": 4722, "run": 0})
    there.close()
    orders = Orders.from_wire(reply["orders"])
    assert orders.action == "notice"
    assert orders.reason == ("another job needs 4 GPUs; another job came first; it can? not?be")
    assert "alice" not in orders.reason
    assert not {"4711", "4600"} & set(re.findall(r"\d+", orders.reason))
    code = json.dumps(reply["orders"]["reason_code"])
    assert orders.reason_code.to_json() == reply["orders"]["reason_code"]
    assert '"job-needs-gpus"' in code
    assert not {"4711", "4600", "alice"} & set(re.findall(r"\w+", code))


def test_users_names_are_not_looked_up_for_each_request(monkeypatch):
    """A directory of users that is slow must not keep everybody's reports waiting."""
    looked_up = []

    def getpwuid(uid):
        looked_up.append(uid)
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", getpwuid)
    there = inbox.ControllerUnderTest()
    for _ in range(5):
        there.reply(build("status"))
    there.close()
    assert len(looked_up) == 1


def raw(**fields):
    return jobs._raw(401, jobs.BOB, {"g03": 2}, **fields)


def test_a_job_that_cannot_be_read_is_left_alone_and_holds_its_gpus():
    broken = pyslurm_records.unreadable(raw(cpus="x"), JobState.RUNNING, "why")
    assert (broken.elastic, broken.gpus, broken.allocation.shares) == (False, 2, (("g03", 2),))
    assert pyslurm_records.unreadable(raw(), JobState.PENDING, "why").allocation is None


def test_what_is_not_utf8_reads_as_empty():
    for value in (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), "a\udc80"):
        assert pyslurm_records.text(raw(name=value), "name") == ""
    assert pyslurm_records.named_nodes(raw(required_nodes="g[1-x"), "required_nodes") == ()


def test_a_strange_node_list_of_one_job_does_not_end_the_round():
    record = Submission(Directive.parse("1-8"), {"req_nodes": "g[0\x1b-x]"}, "", 1)
    job = Job(
        job_id=1, display_id="1", name="", user="bob", uid=2, state=JobState.PENDING, partition="p",
        submission=record, required_nodes=("g01",), run=1,
    )  # fmt: skip
    assert pinned_by_us(job, pin=None)


def test_scontrol_is_not_run_with_a_word_of_control_characters(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it was run"))
    job = job_records.job()
    for value in ("a\nb", "a\0b", "\x1b[31m", "a\udc80"):
        with pytest.raises(ScontrolError, match="expected printable characters") as refusal:
            Scontrol().update(job, {"ReservationName": value})
        assert str(refusal.value).isprintable()


def test_a_line_of_the_topology_that_makes_no_sense_is_left_out():
    text = (
        "SwitchName=a Level=x Nodes=g01\nSwitchName=b Level=0 Nodes=g[01-x]\nSwitchName=c Nodes=g1"
    )
    assert [s.name for s in switches.parse_topology(text)] == ["c"]
    assert gres.parse_link_domains("Name=gpu Count=999999999999 Links=-1,4\n").of("g01") == ()


def test_limits_that_are_no_numbers_are_left_out():
    assert limits.parse_tres("cpu=x,node=inf,mem=9e99P,gres/gpu=4") == {"gpu": 4}


@pytest.mark.parametrize("text", ["9" * 5000 + " sec", "9" * 400])
def test_numbers_of_thousands_of_digits_are_no_times(text):
    assert slurm_settings.seconds(text) is None
    with pytest.raises(ValueError, match="is invalid: expected a time") as refusal:
        formatting.parse_time(f"now-{text}", 0.0)
    assert len(str(refusal.value)) < 150


def test_numbers_of_thousands_of_digits_are_no_ports():
    with pytest.raises(frames.ControllerUnreachableError) as refusal:
        frames.parse_address("ctld:" + "9" * 5000)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize(
    "text", ["[api]\nrate_per_user = " + "9" * 5000, "[api]\nrate_per_user = " + "9" * 400, "[" * 5000,
             "x" * 5000 + " = 1", "[api]\nlisten = " + "[" * 3000],
)  # fmt: skip
def test_an_absurd_elastic_toml_is_refused_in_one_short_line(text):
    with pytest.raises(ConfigError) as refusal:
        parse(text)
    assert len(str(refusal.value)) < 1000


def test_a_layer_with_an_endless_name_is_refused_in_a_short_line():
    layer = Layer("x" * 5000, 1.0, 1.0, 1.0, 1.0)
    with pytest.raises(LayerError, match="xxx") as refusal:
        LayerProfile((layer, layer), ())
    assert len(str(refusal.value)) < 400


def test_an_absurd_accounting_file_is_refused_in_a_short_line(tmp_path):
    path = tmp_path / "sacct.txt"
    lines = (texts_of("sacct-week.txt")).splitlines()
    path.write_text("\n".join([lines[0], lines[1][:-1] + "9" * 5000]))
    assert accounting_trace.read(path).jobs
    path.write_text("\n".join([lines[0], "x" * 9000 + lines[1]]))
    with pytest.raises(accounting_trace.SacctError) as refusal:
        accounting_trace.read(path)
    assert len(str(refusal.value)) < 600


def test_a_count_of_gpus_that_is_no_number_counts_as_one():
    assert shape._gpus_in("gres/gpu:a100:²")[0] == 1
    assert shape._gpus_in("gres/gpu:a100:" + "9" * 5000)[0] == 1
    assert shape._gpus_in("gres/gpu:a100:4") == (4, "a100")


def texts_of(name):
    return (Path(__file__).parents[2] / "data" / name).read_text("utf-8")


def test_the_fuzzer_counts_and_replays(tmp_path):
    from tests.fuzz.__main__ import total

    row = {"surface": "texts", "inputs": 5, "crashes": ["1.2 x"]}
    (tmp_path / "r").write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    assert total(tmp_path / "r").splitlines()[-1].split() == ["texts", "2", "10", "2"]
    assert inbox.one(random.Random("7.5")) == inbox.one(random.Random("7.5"))
