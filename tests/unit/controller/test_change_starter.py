"""Start of the changes of a plan."""

from types import SimpleNamespace

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.change_starter import ChangeStarter
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import Action, Decision, Plan
from slurm_elastic.core.reason import Reason
from tests.support.controller.job_records import Log, allocation, job


def begun(store, planned):
    """Return the jobs whose changes begin by a plan for job 7 as it was then."""
    engine = SimpleNamespace(live={}, begin=lambda changes: [c.decision for c in changes])
    tuner = SimpleNamespace(ahead=lambda *_: None)
    starter = ChangeStarter(store, engine, tuner, Config(), Log())
    grows = Decision(
        job_id=7, current=planned.allocation, target=allocation({"n1": 4}), action=Action.GROW,
        reason=Reason("keeps-allocation"),
    )  # fmt: skip
    snapshot = Snapshot(time=1000.0, nodes=(), jobs=(planned,))
    return starter.begin_planned(snapshot, Plan(time=1000.0, decisions=(grows,)), {})


def test_a_change_does_not_begin_if_the_directive_is_another_since_the_plan_was_made():
    store = JobStore(Ledger(":memory:"))
    planned = store.with_allowed_directive(job({"n1": 1}))
    assert begun(store, planned) == {7}
    store.order(planned, override="1-1")
    assert begun(store, planned) == set()
