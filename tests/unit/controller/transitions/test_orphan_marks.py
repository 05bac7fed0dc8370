"""Which node lists are ours, also after slurmctld has forgotten the last one."""

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.shape import FIRST
from tests.support.controller.job_records import FakeScontrol, Log, changed, job, transition

PER_NODE = {"gpu": {"a100": 4}}


def updates(store, *seen, now=0.0):
    scontrol = FakeScontrol()
    cleanup = OrphanCleanup(scontrol, Config(), store, Log())
    cleanup.sweep(Snapshot(time=now, nodes=(), jobs=seen), {}, per_node=PER_NODE)
    return [c[2] for c in scontrol.calls if c[0] == "update"]


def swept(store, *seen):
    return [fields.get("ReqNodeList") for fields in updates(store, *seen)]


def moved(store, number, *nodes, to_queue=False):
    t = transition(dict.fromkeys(nodes, 4), {"n9": 1}, TransitionState.UNDONE, id=number)
    t.entered |= {"REQUEUE": 1.0}
    if to_queue:
        t.target, t.problem = None, Reason("node-down")
    store.record_end_of_change(t, job(run=number), 100.0 + number)


def test_a_pin_that_slurmctld_remembers_from_before_is_cleared():
    ledger = Ledger(":memory:")
    store = JobStore(ledger)
    moved(store, 1, "n1", "n2")
    moved(store, 2, "n3", to_queue=True)  # nothing is pinned any more, as far as we know
    # slurmctld was killed and is back where it was, or in the midst of what was undone
    for nodes in (("n1", "n2"), ("n3",)):
        assert swept(store, job(run=2, required_nodes=nodes)) == [""]
    assert swept(store, job(run=2, required_nodes=("n1",))) == []  # its owner's own
    store.observe(Snapshot(time=0.0, nodes=(), jobs=(job(run=2),)))
    assert swept(JobStore(ledger), job(run=2, required_nodes=("n3",))) == [""]


def test_where_a_first_start_had_sent_a_job_is_cleared_although_the_ledger_was_lost():
    young = JobStore(Ledger(":memory:"))
    runs = job({"n3": 1}, required_nodes=("n3",))
    young.observe(Snapshot(time=0.0, nodes=(), jobs=(runs,)))
    thrown_out = job(run=1, required_nodes=("n3",))
    assert swept(young, thrown_out) == [""]


def test_a_job_goes_back_to_the_queue_in_a_size_of_the_directive_in_force():
    store = JobStore(Ledger(":memory:"))
    moved(store, 1, "n1", "n2")
    waits = job(run=1, required_nodes=("n1", "n2"), override=Directive.parse("2-4"))
    assert [f["TresPerNode"] for f in updates(store, waits)] == ["gres/gpu:a100:2"]


def test_a_job_whose_node_is_lost_waits_as_long_as_slurm_lets_it():
    store = JobStore(Ledger(":memory:"))
    moved(store, 1, "n1", "n2")
    (fields,) = updates(store, job(run=1, required_nodes=("n1", "n2")))
    assert "StartTime" not in fields


def test_a_nice_value_that_only_a_lost_ledger_knew_is_that_of_the_submission():
    young = JobStore(Ledger(":memory:"))
    first = {"priority": int(FIRST), "shape": {"nice": 7}}
    assert updates(young, job({"n3": 1}, **first)) == [{"Nice": "7"}]
    assert updates(young, job({"n3": 1}, nice=9, **first)) == []
    assert updates(young, job({"n3": 1}, priority=10, shape={"nice": 7})) == []
    assert updates(young, job({"n3": 1}, priority=int(FIRST))) == []
    # It was lost between the end of our priority and that of our reservation.
    reserved = job({"n3": 1}, priority=10, reservation="selastic_7", shape={"nice": 7})
    assert updates(young, reserved) == [{"Nice": "7"}, {"ReservationName": ""}]


def given_back(store, nice=7):
    """Let a change of job 7 end at 100 s, with its nice value given back and read back."""
    t = transition({"n1": 4}, {"n2": 1}, TransitionState.DONE, id=1, nice=nice)
    t.entered |= {"REQUEUE": 90.0, "CLEAR": 99.0}
    store.record_end_of_change(t, job({"n1": 4}, run=1, nice=nice), 100.0)


def test_a_nice_value_that_slurmctld_forgets_after_the_change_is_given_back_again():
    ledger = Ledger(":memory:")
    store = JobStore(ledger)
    runs = job({"n1": 4}, run=1)
    given_back(store)
    assert updates(store, changed(runs, nice=7), now=102.0) == []
    assert updates(store, runs, now=104.0) == [{"Nice": "7"}]
    store.observe(Snapshot(time=104.0, nodes=(), jobs=(runs,)))
    store = JobStore(ledger)  # another controller
    assert updates(store, changed(runs, nice=7), now=108.0) == []
    assert updates(store, runs, now=109.0) == [{"Nice": "7"}], "slurmctld was killed once more"
    assert updates(store, changed(runs, nice=7), now=120.0) == [], "saved"
    assert updates(store, runs, now=121.0) == [], "its owner's"


def test_the_forgotten_nice_value_is_that_of_the_change_not_of_the_submission():
    store = JobStore(Ledger(":memory:"))
    given_back(store, nice=9)
    runs = job({"n1": 4}, run=1, priority=int(FIRST), shape={"nice": 7})
    assert updates(store, runs, now=104.0) == [{"Nice": "9"}]


def test_another_nice_value_of_its_owner_stays_and_one_that_slurm_ignores_is_left():
    store = JobStore(Ledger(":memory:"))
    runs = job({"n1": 4}, run=1)
    given_back(store)
    assert updates(store, changed(runs, nice=3), now=101.0) == []
    assert updates(store, runs, now=102.0) == []
    store = JobStore(Ledger(":memory:"))
    given_back(store)
    assert sum(len(updates(store, runs, now=101.0 + i)) for i in range(9)) == 3
