"""The view that requests are answered from, put together from the parts of the controller.

Requests are answered in other threads: each change replaces `PublishedView.view` as a whole.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.lengths.length_predictions import LengthPredictions
from slurm_elastic.controller.neighbours.neighbour_learning import NeighbourLearning
from slurm_elastic.controller.queries.view import PRIVATE, TransitionRow, View
from slurm_elastic.controller.sleep.sleep_control import SleepControl
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.core.plan import JobRecord, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.milp.round_program import RoundProgram
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader
from slurm_elastic.slurm.shape import describe

#: Seconds between two reads of slurm.conf.
_SETTINGS_S = 300.0


class PublishedView:
    """The newest view, with the controller's notes, and what of it is private.

    Args:
        mode: `[controller] mode`.
        reader, store, engine, tuner, neighbours, lengths, sleep: of the controller.

    Attributes:
        view: the newest one; of no jobs before the first round.
        private: PrivateData of slurm.conf; all of it is taken for private until slurmctld has
            answered.
    """

    def __init__(
        self,
        mode: str,
        *,
        reader: ClusterReader,
        store: JobStore,
        engine: TransitionEngine,
        tuner: BatchTuner,
        neighbours: NeighbourLearning,
        lengths: LengthPredictions,
        sleep: SleepControl,
    ) -> None:
        self._reader, self._store, self._engine, self._tuner = reader, store, engine, tuner
        self._neighbours, self._lengths, self._sleep = neighbours, lengths, sleep
        self.view = View(snapshot=Snapshot(time=0.0, nodes=(), jobs=()), mode=mode)
        self.private = PRIVATE
        self._notes: dict[str, Reason | None] = {}
        self._settings_read = 0.0

    def read_private(self) -> None:
        """Read PrivateData of slurm.conf, which may change at any time."""
        if not self._settings_read or time.monotonic() - self._settings_read > _SETTINGS_S:
            settings = self._reader.settings()
            self.private = PRIVATE.intersection(settings["private_data"])
            self._settings_read = time.monotonic()

    def noted(self, name: str) -> Reason | None:
        """Return the present note of this name, or None."""
        return self._notes.get(name)

    def note(self, name: str, note: Reason | None) -> None:
        """Show a note to operators in place of the last one of this name; None: no more."""
        if name in self._notes and self._notes[name] == note:
            return
        self._notes[name] = note
        notes = tuple(n for n in self._notes.values() if n)
        self.view = dataclasses.replace(self.view, notes=notes)

    def show_round(
        self,
        config: Config,
        snapshot: Snapshot,
        plan: Plan,
        records: Mapping[int, JobRecord],
        *,
        until_next_s: float,
        program: RoundProgram | None,
    ) -> None:
        """Show what a round has decided.

        Args:
            config: of the site.
            snapshot: that it read.
            plan: its result.
            records: of its jobs.
            until_next_s: seconds until the next round.
            program: that it solved; None: its policy solves none.
        """
        self.view = dataclasses.replace(
            self.view,
            snapshot=snapshot,
            plan=plan,
            records=records,
            batches=self._tuner.choices,
            resizes=self._store.resizes(),
            mode=config.controller.mode,
            policy=config.controller.policy,
            next_round=time.time() + max(0.0, until_next_s),
            topology=config.topology,
            kept_since=self._store.kept_since,
            neighbours=self._neighbours.neighbours(snapshot),
            starts=self._lengths.starts,
            program=program,
        )

    def show_sleep(self) -> None:
        """Show which nodes sleep, or could have slept, by the last round."""
        self.view = dataclasses.replace(self.view, sleep=self._sleep.shown())

    def show_changes(self) -> None:
        """Show the changes under way and the newest reports."""
        rows = tuple(
            TransitionRow(
                id=t.id,
                job_id=t.job_id,
                state=t.state.value,
                since=t.since,
                target=describe(t.target),
                reason=t.problem or t.reason,
            )
            for t in self._engine.live.values()
        )
        reports = self._store.last_reports(self.view.snapshot)
        self.view = dataclasses.replace(self.view, transitions=rows, reports=reports)
