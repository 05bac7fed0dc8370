"""Client of the controller: sends reports, receives orders.

One thread reports, at once after an urgent change and else every `report_every_s`; another keeps a
long poll open. A controller that does not answer changes nothing for the job: both try again after
1 to 30 s.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from slurm_elastic.core.report import Orders
from slurm_elastic.core.report_fields import ReportError
from slurm_elastic.job.launch import log_line
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.rpc import frames, requests

_CALL_S = 10.0
_POLL_S = 25.0
#: Seconds after the start during which the controller may not know the job yet.
_UNKNOWN_S = 30.0
_FINAL_RETRY_S = 0.25
_FIRST_PAUSE_S, _LAST_PAUSE_S = 1.0, 30.0


class ControllerClient:
    """Client of the controller at `address`, for the report and orders in `state`.

    Args:
        state: report and orders.
        address: of the controller.
        measure: sets what is to be measured before each report.
    """

    def __init__(
        self, state: ReportState, address: str, *, measure: Callable[[], object] = lambda: None
    ) -> None:
        self._state = state
        self._measure = measure
        self._address = address
        self._stopped = threading.Event()
        self._answered = threading.Event()
        self._started = time.monotonic()
        self._problem = ""
        self._invalid_orders_logged = False
        self._until = 0.0
        self._lock = threading.Lock()
        report = state.report()
        self._job = {"job_id": report.job_id, "run": report.run}
        self._threads = [
            threading.Thread(target=self._report, name="report", daemon=True),
            threading.Thread(target=self._poll, name="orders", daemon=True),
        ]

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, *, final_report_s: float, failed: bool = False) -> None:
        """Stop, after a final report if the controller has answered before.

        Args:
            final_report_s: longest time for it, in seconds.
            failed: also send it if the controller has not had time to answer yet.
        """
        waits = self._answered.is_set() or (failed and not self._problem)
        self._until = time.monotonic() + final_report_s
        self._stopped.set()
        self._answered.set()
        self._state.request_report()
        if waits:
            self._threads[0].join(final_report_s)

    def _report(self) -> None:
        pause = _Pause()
        while True:
            stopping = self._stopped.is_set()
            if not stopping:
                self._measure()
            report = self._state.report()
            reply = self._call(requests.build("report", report=report.to_wire()), _CALL_S)
            if stopping:
                unknown = reply is None and not self._problem
                if unknown and time.monotonic() < self._until:
                    time.sleep(_FINAL_RETRY_S)  # the job ended before the controller knew it
                    continue
                return
            if reply is None:
                self._wait_before_retry(pause.longer())
                continue
            pause = _Pause()
            self._state.mark_reported(report)
            self._accept_reply(reply, authoritative=False)
            self._answered.set()
            self._wait()

    def _wait_before_retry(self, seconds: float) -> None:
        """Wait before the next try; withdraw an overdue notice meanwhile."""
        end = time.monotonic() + seconds
        while not self._stopped.is_set() and (remaining_s := end - time.monotonic()) > 0:
            self._state.expire_notice()
            self._stopped.wait(min(remaining_s, 1.0))

    def _wait(self) -> None:
        """Wait until the next report is due; withdraw an overdue notice meanwhile."""
        end = time.monotonic() + self._state.orders().report_every_s
        while True:
            self._state.expire_notice()
            remaining_s = end - time.monotonic()
            if remaining_s <= 0 or self._state.wait_urgent(min(remaining_s, 1.0)):
                return

    def _poll(self) -> None:
        # The controller answers polls only for jobs that have reported.
        self._answered.wait()
        pause = _Pause()
        while not self._stopped.is_set():
            started = time.monotonic()
            request = requests.build("orders", **self._job, seen=self._state.seq, wait_s=_POLL_S)
            reply = self._call(request, _POLL_S + _CALL_S)
            if reply is not None:
                old_seq = self._state.seq
                self._accept_reply(reply, authoritative=True)
                # Pause after an immediate answer without a change, which would make this loop spin.
                if self._state.seq != old_seq or time.monotonic() - started > 1:
                    pause = _Pause()
                    continue
            self._stopped.wait(pause.longer())

    def _accept_reply(self, reply: dict[str, Any], *, authoritative: bool) -> None:
        try:
            orders = Orders.from_wire(reply.get("orders"))
        except ReportError as error:
            if not self._invalid_orders_logged:
                self._invalid_orders_logged = True
                log_line(f"controller {self._address}: its orders are ignored: {error}")
            return
        self._state.receive(orders, authoritative=authoritative)

    def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        try:
            reply = frames.call(self._address, request, timeout_s=timeout_s)
        except frames.RequestRejectedError as error:
            is_new = time.monotonic() < self._started + _UNKNOWN_S
            if error.code == "unknown_job" and is_new:
                return None
            self._state.give_up_controller()
            self._log_problem(f"controller {self._address} rejects the report: {error}")
        except frames.ChannelError as error:
            self._state.give_up_controller()
            self._log_problem(f"{error}; the job continues without it")
        else:
            if self._problem:
                self._log_problem("")
                log_line(f"controller {self._address} answers again")
            return reply
        return None

    def _log_problem(self, text: str) -> None:
        """Log a problem once, until another replaces it; an empty text ends it."""
        with self._lock:
            if text and text != self._problem and not self._stopped.is_set():
                log_line(text)
            self._problem = text


class _Pause:
    """Pauses of 1, 2, 4 … 30 s, ±25 % so that jobs do not call the controller at the same time."""

    def __init__(self) -> None:
        self._next = _FIRST_PAUSE_S

    def longer(self) -> float:
        seconds, self._next = self._next, min(2 * self._next, _LAST_PAUSE_S)
        return seconds * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
