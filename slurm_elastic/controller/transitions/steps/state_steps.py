"""Base of the steps of all kinds of changes: one action for each state of a transition.

An action looks at the job as Slurm shows it, does at most one thing, and returns the next state.
What Slurm refuses is tried again a few times; then the kind of change decides how it ends.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.steps.step_inputs import StepInputs
from slurm_elastic.core.cluster import Allocation, Job, JobState, shape_parameters
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError

#: Seconds after which a job that could start and does not is given up.
GIVE_UP_S = 25.0
HELD = ("JobHeldUser", "JobHeldAdmin")
#: Times that Slurm may refuse the same thing.
_MOST_REFUSALS = 5

Enter = Callable[[Transition, TransitionState], None]
StateAction = Callable[[Transition, Job, StepInputs], TransitionState | None]


class StateSteps(abc.ABC):
    """Actions of the states of one kind of change.

    Args:
        scontrol: writes.
        log: structlog logger.
    """

    #: State in which a refused step is tried again without end.
    _tries_on: TransitionState | None = None

    def __init__(self, scontrol: Scontrol, log: Any) -> None:
        self._scontrol, self._log = scontrol, log
        self._actions: dict[TransitionState, StateAction] = {}

    def advance(self, t: Transition, job: Job | None, site: StepInputs, enter: Enter) -> None:
        """Do the action of the present state, and enter the next one if it is time.

        Raises:
            ScontrolError: slurmctld refused or did not answer; called again, it is tried again.
        """
        if job is None:
            self._job_ended(t, site)
            t.problem = t.problem or Reason("job-ended")
            enter(t, TransitionState.ENDED)
            return
        following = self._interrupted(t, job)
        if following is None:
            following = self._act(t, job, site)
        if following is not None and following is not t.state:
            enter(t, following)

    def _act(self, t: Transition, job: Job, site: StepInputs) -> TransitionState | None:
        try:
            return self._actions[t.state](t, job, site)
        except SlurmUnreachableError:
            raise
        except ScontrolError as error:
            t.refused += 1
            if t.refused < _MOST_REFUSALS or t.state is self._tries_on:
                raise
            return self._refused(t, job, site, error)

    def _job_ended(self, t: Transition, site: StepInputs) -> None:  # noqa: B027 - for some kinds
        """Clean up after a job that has ended."""

    def _interrupted(self, _t: Transition, _job: Job) -> TransitionState | None:
        """Return the state of a job that has left its attempt meanwhile; None: it goes on."""
        return None

    @abc.abstractmethod
    def _refused(
        self, t: Transition, job: Job, site: StepInputs, error: ScontrolError
    ) -> TransitionState:
        """Return the state after a step that Slurm keeps refusing."""


def runs_elsewhere(held: Allocation | None) -> Reason:
    """Return the reason of a job that runs on other GPUs than planned."""
    return Reason("runs-elsewhere", **shape_parameters(held), nodes=held.nodes if held else ())


def interruption_of(t: Transition, job: Job) -> Reason | None:
    """Return why a job that was asked to save does not train any more; None if it does."""
    if job.run == t.run and job.state is JobState.SUSPENDED:
        return Reason("job-suspended")
    if job.state is not JobState.RUNNING or job.run != t.run:
        return Reason("job-left-gpus")
    return Reason("held-in-slurm") if job.reason in HELD else None
