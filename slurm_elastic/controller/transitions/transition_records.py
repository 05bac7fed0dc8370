"""Transitions in the ledger: read at the start, written before each step, caught up with later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.reason import Reason


class TransitionRecords:
    """Rows of transitions.

    Args:
        ledger: where they are kept.
        log: structlog logger.
    """

    def __init__(self, ledger: Ledger, log: Any) -> None:
        self._ledger, self._log = ledger, log
        self._unwritten: list[Transition] = []

    def live(self) -> Iterator[Transition]:
        """Return the transitions that were under way; an unreadable row is ended."""
        for id_, _, body in self._ledger.live_transitions():
            try:
                yield Transition.from_body({**body, "id": id_})
            except ValueError as error:  # `OrphanCleanup` clears its traces in Slurm
                self._log.warning(f"Transition={id_} Problem={error}")
                self._ledger.put_transition(id_, TransitionState.ENDED.value, body, live=False)

    def add(self, transition: Transition) -> None:
        """Write a new transition, which gets its id.

        Raises:
            LedgerError: it cannot be written.
        """
        body = transition.to_body()
        transition.id = self._ledger.add_transition(transition.job_id, transition.key, body)

    def put(self, transition: Transition) -> None:
        """Write a transition as it is now.

        Raises:
            LedgerError: it cannot be written.
        """
        self._ledger.put_transition(
            transition.id,
            transition.state.value,
            transition.to_body(),
            live=transition.state.live,
        )

    def put_later(self, transition: Transition) -> None:
        """Write the end of a transition, or keep it for `catch_up`."""
        try:
            self.put(transition)
        except LedgerError:
            self._unwritten.append(transition)

    def give_up(self, transitions: list[Transition]) -> None:
        """End transitions that could not be written; `catch_up` writes them down."""
        for t in transitions:
            t.state, t.problem = TransitionState.UNDONE, Reason("not-written")
        self._unwritten += transitions

    def catch_up(self) -> None:
        """Write the ends of transitions that could not be written before.

        Raises:
            LedgerError: they still cannot be written.
        """
        while self._unwritten:
            self.put(self._unwritten[0])
            del self._unwritten[0]

    def put_result(self, job: Job, id_: int, result: str, problem: Reason | None) -> None:
        """Add the result of a rehearsal to the history.

        Raises:
            LedgerError: it could not be written.
        """
        for row in self._ledger.ended_transitions(job.job_id, job.key):
            if row.get("id") == id_ and row.get("result") != result:
                transition = Transition.from_body(row)
                transition.result, transition.problem = result, problem
                self.put(transition)
                why = f" Problem={problem}" if problem else ""
                self._log.info(
                    f"{transition} Action={transition.action.value} Result={result}{why}"
                )


def changes(ledger: Ledger, job: Job) -> Iterator[Transition]:
    """Yield the transitions of a job that have ended and can be read, oldest first."""
    for row in ledger.ended_transitions(job.job_id, job.key):
        try:
            yield Transition.from_body(row)
        except ValueError:
            continue


def last_change(ledger: Ledger, job: Job) -> Transition | None:
    """Return the last transition of a job that has ended; None without one that can be read."""
    rows = ledger.ended_transitions(job.job_id, job.key)
    try:
        return Transition.from_body(rows[-1])
    except (IndexError, ValueError):
        return None
