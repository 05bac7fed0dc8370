"""`selastic update`: directive and layout, accepted or refused as a whole, and told."""

import sqlite3
from pathlib import Path

import pytest

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.queries.view import View
from slurm_elastic.controller.server.directive_update import DirectiveUpdate, updated
from slurm_elastic.controller.server.request_dispatcher import RequestRefusedError
from slurm_elastic.controller.server.request_handler import RequestHandler
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.policies import policy_protocol
from tests.support.controller.job_records import FakeScontrol, Log, job


class Site:
    """A controller that knows job 7, and its handler."""

    def __init__(self, path, known):
        self.ledger, self.job = Ledger(path), known
        config = Config()
        self.controller = Controller(
            config=config,
            reader=None,
            scontrol=FakeScontrol(),
            ledger=self.ledger,
            policy=policy_protocol.load(config),
            account="selastic",
            log=Log(),
        )
        self.see(known)
        self.log = Log()
        self.handler = RequestHandler(
            self.controller, check=lambda _: {}, reconfigure=lambda: "", log=self.log
        )

    def see(self, known):
        self.controller.listing.jobs = {known.job_id: known}  # what it last read

    def update(self, **args):
        answer = self.handler.command(2001, "update", {"job_ids": (7,), "dry_run": False, **args})
        (result,) = answer["results"]
        return result["ok"], result["text"]

    def orders(self, run=0):
        return self.handler.orders(7, run)


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path / "ledger.sqlite", job({"n1": 4}, directive="1-8,parallel=hybrid"))


def test_a_layout_is_kept_and_told(site, tmp_path):
    before = site.orders()
    assert before == Orders(seq=before.seq, in_place=True), "who orders nothing changes nothing"
    assert site.update(layout="2x2") == (True, "layout 2x2")
    told = site.orders()
    assert told.layout == "2x2"
    assert told.seq > before.seq
    assert site.orders() == told, "nothing new, so no other number"
    site.ledger.close()
    again = Site(tmp_path / "ledger.sqlite", job({"n1": 4}, directive="1-8,parallel=hybrid", run=3))
    report = Report(job_id=7, run=3, phase="starting")
    assert again.handler.report(2001, report).layout == "2x2", "the first answer after a restart"
    assert again.orders(3).layout == "2x2"
    assert again.update(layout="auto") == (True, "layout auto: the job's own choice")
    assert again.orders(3).layout == ""


def test_a_dry_run_changes_nothing(site):
    before = site.orders()
    assert site.update(layout="2-1-1", dry_run=True) == (True, "layout 2-1-1")
    assert site.update(elastic="1-2,parallel=hybrid", layout="1x2", dry_run=True)[0]
    assert site.orders() == before
    assert site.controller.store.entry(site.job).override == ""


def test_commands_that_are_carried_out_are_logged_with_their_user(site):
    site.update(layout="2x2", dry_run=True)
    site.update(layout="3x3x3x3")
    assert site.log.lines == []
    site.update(layout="2x2")
    for op in ("hold", "release"):
        site.handler.command(0, op, {"job_ids": (7,)})
    site.handler.command(0, "reconfigure", {})
    assert site.log.lines == [
        "JobId=7 Command=update User=- Uid=2001 Text=layout 2x2",
        "JobId=7 Command=hold User=root Uid=0 Text=held: its allocation is kept",
        "JobId=7 Command=release User=root Uid=0 Text=released: may be resized again",
        "Command=reconfigure User=root Uid=0",
    ]


def test_a_layout_of_another_size_waits(site):
    site.update(layout="2x2")
    before = site.orders()
    assert site.update(layout="1x2") == (True, "layout 1x2 as soon as it has 2 GPUs")
    assert site.orders() == before, "nothing for the attempt that has 4 of them"
    site.see(job({"n1": 2}, directive="1-8,parallel=hybrid", run=1))
    assert site.orders(1).layout == "1x2"
    assert site.orders(1).seq > before.seq
    site.see(job(directive="1-8,parallel=hybrid", run=2))  # pending
    assert site.update(layout="2-2")[1] == "layout 2x2 as soon as it has 4 GPUs"


def test_size_mode_and_layout_in_one_command(site):
    site.see(job({"n1": 4}, directive="1-8"))
    assert site.update(layout="2x1")[0] is False
    done, text = site.update(elastic="2,parallel=hybrid", layout="1x2")
    assert done
    assert text == "--elastic=2,parallel=hybrid; layout 1x2 as soon as it has 2 GPUs"
    present = site.orders()
    assert not present.layout, "this attempt is about to lose its GPUs"
    assert not present.directive
    orders = site.orders(1)
    assert (orders.layout, orders.directive) == ("1x2", "2,parallel=hybrid")
    site.see(job({"n1": 2}, directive="1-8", run=1))
    assert site.orders(1) == orders
    site.update(elastic="1-4,parallel=hybrid")
    assert site.orders(1).directive == "1-4,parallel=hybrid", "allows what it holds"


@pytest.mark.parametrize(
    ("directive", "args", "why"),
    [
        ("1-8", {"layout": "4x1"}, "parallel=data always runs as GPUs x 1; add --elastic"),
        ("1-8,parallel=pipeline", {"layout": "2x2"}, "has one replica: write 1x4, or"),
        ("1-8,parallel=pipeline", {"layout": "2-1"}, "has one replica: write 1x3, or"),
        ("1-8", {"layout": "2x1s2"}, "parallel=data has no spatial groups; add --elastic"),
        ("2-8,parallel=spatial,unit=2", {"layout": "1x2"}, "has no stages: write Rx1sN"),
        ("2-8,parallel=spatial,unit=2", {"layout": "1x1s4"}, "unit=2 asks for groups of 2 GPUs"),
        ("1-8,parallel=hybrid", {"layout": "4x4"}, "layout 4x4 needs 16 GPUs, which"),
        ("2-8,parallel=hybrid,unit=2", {"layout": "3x1"}, "layout 3x1 needs 3 GPUs, which"),
        ("2-8,parallel=hybrid,unit=2", {"layout": "1x4"}, "unit=2 asks for replicas of 2 GPUs"),
        ("2-8,parallel=hybrid,unit=2", {"layout": "3-1"}, "unit=2 asks for replicas of 2 GPUs"),
        ("1-8,parallel=hybrid", {"layout": "4"}, "'4' is invalid: expected RxS"),
        ("1-8,parallel=hybrid", {"layout": ""}, "or auto"),
        ("1-8,parallel=hybrid", {"elastic": "8-1", "layout": "2x2"}, "write 1-8"),
        ("1-8,parallel=hybrid", {"elastic": "1-2,parallel=hybrid", "layout": "2x2"}, "needs 4"),
        ("1-8,parallel=hybrid", {"elastic": "1-8", "layout": "2x2"}, "parallel=data"),
        ("1-8,parallel=hybrid", {}, "nothing to change"),
    ],
)
def test_what_cannot_be_is_refused_as_a_whole(directive, args, why):
    with pytest.raises(RequestRefusedError) as caught:
        updated(job({"n1": 4}, directive=directive), "", args)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("directive", "layout"),
    [
        ("1-8,parallel=pipeline", "1x4"),
        ("1-8,parallel=pipeline", "1x2x2"),
        ("1-8,parallel=hybrid", "4x1"),
        ("1-8", "2x1+tensor=2"),
        ("1-8", "4x1+recompute"),
        ("2-8,parallel=hybrid,unit=2", "2x1+tensor=2"),
        ("4-8,parallel=hybrid,unit=4", "2x2+tensor=2"),
        ("2-8,parallel=hybrid,unit=2", "2x2"),
        ("2-8,parallel=hybrid,unit=a100:2/v100:4", "1x4"),
        ("2-8,types=v100:a100,parallel=hybrid,unit=v100:4", "1x3"),
    ],
)
def test_what_can_be_is_accepted(directive, layout):
    wishes, _ = updated(job({"n1": 4}, directive=directive), "", {"layout": layout})
    assert wishes == DirectiveUpdate("", layout)


def test_a_directive_that_rules_the_layout_out_takes_it_back():
    running = job({"n1": 4}, directive="1-8,parallel=hybrid")
    kept, _ = updated(running, "2x2", {"elastic": "4,parallel=hybrid"})
    assert kept == DirectiveUpdate("4,parallel=hybrid", "2x2")
    left, text = updated(running, "2x2", {"elastic": "1-2,parallel=hybrid"})
    assert left == DirectiveUpdate("1-2,parallel=hybrid", "")
    assert text.endswith("layout 2x2 is no longer possible: the job's own choice")


def test_a_layout_alone_keeps_the_directive_that_was_put_in_place():
    override = Directive.parse("1-4,parallel=hybrid")
    wishes, _ = updated(job({"n1": 4}, override=override), "", {"layout": "2x2"})
    assert wishes == DirectiveUpdate("1-4,parallel=hybrid", "2x2")


def test_what_cannot_be_written_down_is_not_done(site):
    before = site.orders()
    site.ledger.close()
    done, text = site.update(elastic="1-4,parallel=hybrid", layout="2x2")
    assert not done
    assert "ledger" in text
    assert site.orders() == before
    assert site.controller.store.entry(site.job).override == ""


def test_only_elastic_jobs(site):
    site.see(job({"n1": 4}, submission=None))
    assert site.update(layout="2x2") == (False, "not an elastic job")


def test_a_layout_that_cannot_be_read_back_is_not_told(site, tmp_path):
    site.update(layout="2x2")
    site.ledger.close()
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("UPDATE jobs SET record = replace(record, '2x2', '2y2')")
    again = Site(Path(tmp_path / "ledger.sqlite"), site.job)
    assert again.orders().layout == ""


def test_the_snapshot_is_enough_to_know_a_job(site):
    site.controller.listing.jobs = {}
    site.controller.published.view = View(snapshot=Snapshot(time=1.0, nodes=(), jobs=(site.job,)))
    assert site.update(layout="2x2")[0]


def test_show_says_what_was_ordered_and_what_the_layers_cost(site):
    site.update(layout="2x2")
    rows = (("a", 0.1, 0.2, 10, 20), ("b", 0.1, 0.2, 10, 20))
    seen = Report(job_id=7, run=0, phase="training", profile=rows, layout="4x1", gpus=4)
    site.handler.report(2001, seen)
    snapshot = Snapshot(time=1.0, nodes=(), jobs=(site.job,))
    site.controller.published.view = View(snapshot=snapshot, reports={7: seen})
    shown = site.handler.question(2001, "show", {"job_ids": (7,), "profile": True})
    assert (shown["ordered_layout"], shown["running"]["layout"]) == ("2x2", "4x1")
    assert [row["name"] for row in shown["profile"]["layers"]] == ["a", "b"]
    assert shown["profile_layers"] == 2


def test_an_execution_plan_is_kept_and_told_with_its_layout(site, tmp_path):
    assert site.update(layout="4x1+recompute+shard=full") == (
        True,
        "layout 4x1+shard=full+recompute",
    )
    assert (site.orders().layout, site.orders().plan) == ("4x1", "4x1+shard=full+recompute")
    both = "2x1+tensor=2+shard=full"
    assert site.update(layout=both) == (True, f"layout {both}")
    assert (site.orders().layout, site.orders().plan) == ("2x1", both)
    assert site.update(layout="2x2+shard=optimizer") == (True, "layout 2x2+shard=optimizer")
    # A layout alone ends the options.
    assert site.update(layout="2x2") == (True, "layout 2x2")
    assert (site.orders().layout, site.orders().plan) == ("2x2", "")
    assert site.update(layout="1x2+recompute")[1] == "layout 1x2+recompute as soon as it has 2 GPUs"
    assert site.orders().plan == ""
    assert site.orders(1).plan == "1x2+recompute"


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ("1x2+tensor=2+shard=full", "shard=full gathers whole layers, stages divide them"),
        ("4x1+shard=offload", "shard=offload cannot be trained with"),
        ("4x1+shard", "option 'shard' is invalid"),
        ("16x1+recompute", "needs 16 GPUs"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_in_one_line(site, plan, named):
    done, text = site.update(layout=plan)
    assert not done
    assert named in text
    assert "\n" not in text
