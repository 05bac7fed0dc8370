"""Carries out a hand-written plan with the real engine; runs in ctld as the operator account.

    resize.py --ledger FILE --plan JSON [--freeze JOB=STATE …]     begin, and go on
    resize.py --ledger FILE                                        go on after a crash

PLAN: {"JOB": ["TYPE", {"NODE": GPUS}], "JOB": null}; null lets the job wait. Jobs are taken to
have saved as soon as they are asked. A transition that reaches its --freeze state stays there;
when all of them have, the process kills itself with SIGKILL. Prints one JSON object per
transition that ended.
"""

import argparse
import json
import os
import pwd
import signal
import sys
import time

import structlog

from slurm_elastic.config import schema
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.controller.transitions.orphan_cleanup import OrphanCleanup
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.readers.reader_choice import connect
from slurm_elastic.slurm.scontrol import Scontrol


class Frozen(BaseException):
    """Controller whose one transition stays in its state."""


class FreezingEngine(TransitionEngine):
    def __init__(self, freeze: dict[int, TransitionState], **parts) -> None:
        super().__init__(**parts)
        self.freeze, self.frozen = freeze, set()

    def _enter(self, transition, state):
        super()._enter(transition, state)
        if self.freeze.get(transition.job_id) is state:
            self.frozen.add(transition.job_id)
            raise Frozen

    def _advance(self, transition, site):
        if transition.state is TransitionState.RESERVE is self.freeze.get(transition.job_id):
            self.frozen.add(transition.job_id)
        if transition.job_id in self.frozen:
            return transition, None, None
        try:
            return super()._advance(transition, site)
        except Frozen:
            return transition, None, None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--plan", type=json.loads, default={})
    parser.add_argument("--freeze", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=60.0)
    args = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    log = structlog.get_logger()
    reader = connect(reservation_prefix="selastic_")
    ledger, settings, scontrol = (
        Ledger(args.ledger),
        schema.Config(slurm=schema.SlurmSettings(lease_s=60)),
        Scontrol(),
    )
    account = pwd.getpwuid(os.geteuid()).pw_name
    freeze = {int(j): TransitionState(s) for j, s in (f.split("=") for f in args.freeze)}
    engine = FreezingEngine(
        freeze, scontrol=scontrol, ledger=ledger, config=settings, account=account, log=log
    )
    snapshot = reader.snapshot()
    sizes = {n.name: n.gpus for n in snapshot.nodes}
    per_node = {"gpu": {n.gpu_type: n.gpus for n in snapshot.nodes}}
    changes = []
    for name, target in args.plan.items():
        job = snapshot.job[int(name)]
        decision = Decision(
            job_id=job.job_id,
            current=job.allocation,
            target=Allocation.of(*target) if target else None,
            action=Action.MOVE if target else Action.PREEMPT,
            reason=Reason("text", text="by hand"),
        )
        changes.append(RequestedChange(decision, job, 30.0))
    began = time.time()
    if changes:
        engine.begin(changes)
    else:
        store = JobStore(ledger)
        found = OrphanCleanup(scontrol, settings, store, log).sweep(
            snapshot, engine.live, per_node=per_node
        )
        engine.reservations.adopt(found)
    while time.time() - began < args.limit:
        jobs = reader.jobs()
        for t in engine.live.values():
            if t.state is TransitionState.NOTIFY and t.job_id not in engine.frozen:
                engine.acknowledge(t.job_id, t.run, t.id, step=1)
        engine.step(jobs, sizes=sizes, per_node=per_node)
        if engine.freeze and engine.frozen == set(engine.freeze):
            os.kill(os.getpid(), signal.SIGKILL)
        if not engine.live:
            engine.step(jobs, sizes=sizes, per_node=per_node)
            break
        time.sleep(0.1)
    for transition, _ in engine.ended:
        print(json.dumps(transition.to_body()))


main()
