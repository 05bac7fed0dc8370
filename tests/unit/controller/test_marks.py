"""Which node lists are ours, also after slurmctld has forgotten the last one."""

from desk_jobs import FakeScontrol, Log, job, transition

from slurm_elastic.cluster import Snapshot
from slurm_elastic.config import Config
from slurm_elastic.controller.book import Book
from slurm_elastic.controller.housekeeping import Housekeeping
from slurm_elastic.controller.ledger import Ledger
from slurm_elastic.controller.transition import State

PER_NODE = {"gpu": {"a100": 4}}


def swept(book, *seen):
    scontrol = FakeScontrol()
    keeper = Housekeeping(scontrol, Config(), book, Log())
    keeper.sweep(Snapshot(time=0.0, nodes=(), jobs=seen), {}, per_node=PER_NODE)
    return [c[2].get("ReqNodeList") for c in scontrol.calls if c[0] == "update"]


def moved(book, number, *nodes, to_queue=False):
    t = transition(dict.fromkeys(nodes, 4), {"n9": 1}, State.UNDONE, id=number)
    t.entered |= {"REQUEUE": 1.0}
    if to_queue:
        t.target, t.problem = None, "a node went away"
    book.changed(t, job(run=number), 100.0 + number)


def test_a_pin_that_slurmctld_remembers_from_before_is_cleared():
    ledger = Ledger(":memory:")
    book = Book(ledger)
    moved(book, 1, "n1", "n2")
    moved(book, 2, "n3", to_queue=True)  # nothing is pinned any more, as far as we know
    # slurmctld was killed and is back where it was, or in the midst of what was undone
    for nodes in (("n1", "n2"), ("n3",)):
        assert swept(book, job(run=2, required_nodes=nodes)) == [""]
    assert swept(book, job(run=2, required_nodes=("n1",))) == []  # its owner's own
    book.observe(Snapshot(time=0.0, nodes=(), jobs=(job(run=2),)))
    assert swept(Book(ledger), job(run=2, required_nodes=("n3",))) == [""]


def test_where_a_first_start_had_sent_a_job_is_cleared_although_the_ledger_was_lost():
    young = Book(Ledger(":memory:"))
    runs = job({"n3": 1}, required_nodes=("n3",))
    young.observe(Snapshot(time=0.0, nodes=(), jobs=(runs,)))
    thrown_out = job(run=1, required_nodes=("n3",))
    assert swept(young, thrown_out) == [""]
