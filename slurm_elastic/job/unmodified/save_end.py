"""End of a running save, before the ranks of a failed start are killed.

When a companion is lost, or its ranks have failed, the other ranks are killed, too. One of them may
be saving at that moment: a script that overwrites its only checkpoint would lose it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from slurm_elastic.job.launch import log_line

_TICK_S = 0.1
#: Most times that a save may begin between the check and the stop of the ranks.
_ATTEMPTS = 5


def stop_between_saves(
    is_saving: Callable[[], bool],
    *,
    has_ended: Callable[[], bool],
    stop: Callable[[], object],
    resume: Callable[[], object],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Wait until no save is under way and the ranks are stopped, or have ended.

    Args:
        is_saving: returns whether a save is under way that still goes on.
        has_ended: returns whether the ranks that save have ended.
        stop: stops them (SIGSTOP).
        resume: continues them, as a save had begun before they were stopped.
        sleep: sleeps for some seconds.
    """
    for attempt in range(_ATTEMPTS):
        is_logged = attempt > 0
        while is_saving() and not has_ended():
            if not is_logged:
                log_line("a save is under way: the ranks are ended after it")
                is_logged = True
            sleep(_TICK_S)
        if has_ended():
            return
        stop()
        if not is_saving():
            return
        resume()
