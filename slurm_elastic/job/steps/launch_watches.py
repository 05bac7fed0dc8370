"""Watches for programs that esrun should not have started on several ranks as they are.

A program may start a launcher in each rank, or have been written for one GPU, so that each rank
trains alone. Or it may write its checkpoints where the pattern does not match.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from slurm_elastic.job.launch import RankLaunch, log_line
from slurm_elastic.job.launchers.launcher_site import recognise
from slurm_elastic.job.launchers.lone_ranks import trains_alone
from slurm_elastic.job.launchers.moved_directory import MovedDirectoryWatch
from slurm_elastic.job.launchers.nested_launch import NestedLaunchWatch, RankProcess
from slurm_elastic.job.launchers.rendezvous_watch import UNSEEN_S, RendezvousWatch


class LaunchWatches:
    """Watches of the ranks on this host, begun anew with each start of the program.

    Args:
        launch: of the program.
        on_nested: called with the launcher that the program has started in each rank.
        uses_library: returns whether the program uses the training library.
        has_begun_save: returns whether the program has begun a save in this start; None: it is not
            watched.
    """

    def __init__(
        self,
        launch: RankLaunch,
        *,
        on_nested: Callable[[str], None],
        uses_library: Callable[[], bool],
        has_begun_save: Callable[[], bool] | None = None,
    ) -> None:
        self._launch, self._on_nested = launch, on_nested
        self._uses_library, self._has_begun_save = uses_library, has_begun_save
        self._nested: NestedLaunchWatch | None = None
        self._rendezvous: RendezvousWatch | None = None
        self._directory: MovedDirectoryWatch | None = None

    def begin(self, mark: str) -> None:
        """Begin to watch the ranks with this mark in their environment."""
        launch, here = self._launch, self._launch.allocation.here
        if launch.ranks == 1 and launch.options.checkpoint is None:
            return
        if here in launch.nodes:
            self._directory = self._directory_watch(mark)
        if recognise(launch.options.program) is not None:
            return  # esrun has started the launcher itself
        if here in launch.nodes:
            self._nested = NestedLaunchWatch(mark, launch.allocation.run_id, self._on_nested)
            self._nested.start()
        if launch.ranks > 1 and here == launch.nodes[0]:
            self._rendezvous = self._rendezvous_watch()
            self._rendezvous.start()

    def _directory_watch(self, mark: str) -> MovedDirectoryWatch | None:
        pattern, has_begun_save = self._launch.options.checkpoint, self._has_begun_save
        if not pattern or pattern.startswith("/") or has_begun_save is None:
            return None
        watch = MovedDirectoryWatch(mark, pattern, has_begun_save=has_begun_save, log=log_line)
        watch.start()
        return watch

    def _rendezvous_watch(self) -> RendezvousWatch:
        port = int(self._launch.environment["MASTER_PORT"])
        if self._has_begun_save is None:
            return RendezvousWatch(port, self._warn_of_lone_ranks, meet_s=UNSEEN_S)
        return RendezvousWatch(port, self._warn_of_lone_ranks, has_begun=self._has_begun_save)

    def end(self) -> None:
        """End the watches: the ranks have ended."""
        for watch in (self._nested, self._rendezvous, self._directory):
            if watch is not None:
                watch.end()
        self._nested = self._rendezvous = self._directory = None

    def train_alone(self, processes: Mapping[int, RankProcess], saved_bytes: int) -> bool | None:
        """Return whether each rank on this host trains alone, by `lone_ranks.trains_alone`."""
        if self._rendezvous is None:
            return False  # a launcher starts them, or rank 0 runs on another host
        return trains_alone(processes, saved_bytes)

    def _warn_of_lone_ranks(self) -> None:
        if not self._uses_library():
            log_line(
                f"no rank listens at MASTER_PORT: unless the {self._launch.ranks} ranks know"
                " of each other in another way, each trains alone and they overwrite each other's"
                " checkpoints; a program for one GPU needs --elastic=1-1"
            )
