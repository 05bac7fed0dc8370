"""Jobs, transitions, a log and a fake scontrol for tests of the controller."""

import dataclasses
import inspect

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.submission import Submission
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Of job 7, for the ledger.
SEGMENT = {
    "key": "7@1",
    "job_id": 7,
    "user": "alice",
    "name": "gpt",
    "run": 0,
    "gpu_type": "a100",
    "gpus": 4,
    "nodes": "n1:4",
    "start": 100.0,
}


class FakeScontrol:
    """Scontrol that keeps its calls; `refuse` makes every call fail."""

    def __init__(self):
        self.calls, self.refuse = [], ""

    def __getattr__(self, verb):
        signature = inspect.signature(getattr(Scontrol, verb))  # no other verbs, nor arguments

        def call(*words, **named):
            signature.bind(self, *words, **named)
            if self.refuse:
                raise ScontrolError(self.refuse)
            shown = [w.display_id if isinstance(w, Job) else w for w in words]
            self.calls.append((verb, *shown, *named.values()))

        return call

    def fields(self):
        """Return the fields of the last update."""
        return next(c[2] for c in reversed(self.calls) if c[0] == "update")


class Log:
    """Log that keeps its lines."""

    def __init__(self):
        self.lines = []

    def info(self, line):
        self.lines.append(line)

    warning = error = debug = info


def allocation(shares):
    return Allocation.of("a100", shares) if shares else None


def job(shares=None, *, directive="1-8", shape=(), **fields):
    """Return job 7: running on `shares`, or pending."""
    values = {
        "job_id": 7,
        "display_id": "7",
        "name": "",
        "user": "alice",
        "uid": 2001,
        "partition": "gpu",
        "state": JobState.RUNNING if shares else JobState.PENDING,
        "allocation": allocation(shares),
        "gpus": sum((shares or {}).values()),
        "submission": Submission(Directive.parse(directive), dict(shape), "", 100),
    }
    return Job(**(values | fields))


def transition(target, old=None, state=TransitionState.RESERVE, **fields):
    """Return a transition of job 7 that entered its state long ago."""
    values = {
        "id": 1,
        "job_id": 7,
        "display_id": "7",
        "key": "7@100",
        "user": "alice",
        "uid": 2001,
        "action": Action.MOVE,
        "run": 0,
        "old": allocation(old),
        "target": allocation(target),
        "planned": allocation(target),
        "reason": Reason("waits"),
        "reservation": "selastic_1",
        "state": state,
        "entered": {state.value: 0.0},
    }
    return Transition(**(values | fields))


def changed(value, **fields):
    return dataclasses.replace(value, **fields)
