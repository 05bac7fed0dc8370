"""Restart of the job's own ranks when a companion is lost that the others cannot go on without.

All ranks of the base exit with the code by which esrun starts them again, without that companion.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.regroup_leader import RegroupLeader
from slurm_elastic.training.regroup.regroup_member import RegroupMember
from slurm_elastic.training.regroup.regrouping import SEPARATED
from slurm_elastic.training.signals import PEERS_END_S, Signals, exit_now

_RESTART_KEY = "restart-without-companions"
_POLL_S = 0.2
#: An hour: how long the other ranks wait for rank 0 to save.
_LONG_S = 3600.0


class LossRestart:
    """Restart of one rank.

    Args:
        rank_group: all ranks.
        regrouping: has the ranks that are lost.
        signals: SIGTERM ends a rank that waits.
        save: saves on rank 0 if that is possible; returns the text for the log.
        unnoticed_s: how long the training may take to notice, by an error, that a companion is
            lost. A network that is cut without a message is never noticed.

    Attributes:
        handling: a loss is being dealt with.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        regrouping: RegroupMember | RegroupLeader,
        *,
        signals: Signals,
        save: Callable[[], str],
        unnoticed_s: float,
    ) -> None:
        self._rank_group, self._regrouping, self._signals = rank_group, regrouping, signals
        self._save, self._unnoticed_s = save, unnoticed_s
        self._base_size = rank_group.size
        self.handling = False

    def watch(self) -> None:
        """Restart in place of a training that does not notice a loss, from another thread."""
        threading.Thread(target=self._watch, name="losses", daemon=True).start()

    def switch(self, number: int, confirm: Callable[[], object]) -> None:
        """Continue in another generation; members that are lost meanwhile are left out.

        Args:
            number: of the generation.
            confirm: waits until all its ranks have arrived (`wait_for_arrival`).
        """
        self.handling = True
        try:
            self._regrouping.switch(number)
        except GroupBrokenError:
            self._regrouping.recover()
        confirm()
        self.handling = False

    def restart(self) -> None:
        """Save if that is possible, and exit to be started again; return if nothing is lost."""
        group, regrouping = self._rank_group, self._regrouping
        alarm = group.guard.alarm
        if not group.guard.on or not alarm.wait(PEERS_END_S):
            return
        self.handling = True
        if group.companion:
            log_line(f"rank {regrouping.name}: another companion is lost; its own job ends")
            exit_now(SEPARATED)
        if isinstance(regrouping, RegroupLeader):
            lost = regrouping.lost_companions(PEERS_END_S)
            group.guard.on = False
            if not lost:
                group.publish(_RESTART_KEY, "")
                return
            saved = self._save()
            log_line(f"ranks {', '.join(lost)} are lost; {saved}; the ranks of the job start again")
        else:
            group.guard.on = False
            with contextlib.suppress(RuntimeError):  # rank 0 has ended
                if group.wait_for(_RESTART_KEY, _LONG_S):
                    self._exit_together()
            return
        self._exit_together()

    def _watch(self) -> None:
        group = self._rank_group
        leads = group.rank == 0
        while True:
            if not group.guard.alarm.wait(_POLL_S) or self.handling:
                time.sleep(_POLL_S)
                continue
            end = time.monotonic() + self._unnoticed_s
            while group.guard.alarm.is_set() and not self.handling:
                if (leads and time.monotonic() > end) or group.has_published(_RESTART_KEY):
                    self.handling = True
                    self._exit_together()
                time.sleep(_POLL_S)

    def _exit_together(self) -> None:
        """Exit on all ranks of the base with the code by which esrun starts them again."""
        group = self._rank_group
        group.guard.on = False
        self._regrouping.close()
        if group.rank == 0:
            group.publish(_RESTART_KEY, "now")
        self._signals.exit_at_once(True)
        with contextlib.suppress(RuntimeError):
            group.barrier("leaving", PEERS_END_S, size=self._base_size)
        exit_now(RESTART_CODE)
