"""Times of steps whose gradients are exchanged during the backward pass.

The exchange lengthens that pass: what a rank waits for after it (`sync_s`) is only a part of the
time that the exchange costs. The whole is `exposed` times the exchange alone
(docs/training-exchange.md#exposed-in-reports).
"""

from __future__ import annotations

import dataclasses

from slurm_elastic.core.report import Report


def schedule_kind(schedule: str) -> str:
    """Return the kind of a schedule of exchange; "": after the backward pass, or not reported.

    Step times of two kinds are on two curves. The size of buckets is chosen anew in each
    allocation, so all sizes are of one kind.

    >>> [schedule_kind(name) for name in ("", "flat", "buckets-1MiB", "buckets-25MiB")]
    ['', '', 'buckets', 'buckets']
    """
    return "" if schedule == "flat" else schedule.partition("-")[0]


def separated(report: Report) -> Report:
    """Return a report in which the exposed exchange is waiting, and nothing of it is computing.

    Reports that do not state the exchange's time (an older library, no trial) stay as they are.
    """
    exposed, alone_s = report.exposed, report.exchange_s
    backward_s, sync_s = report.backward_s, report.sync_s
    if not schedule_kind(report.exchange) or exposed is None or not alone_s:
        return report
    if backward_s is None or sync_s is None:
        return report
    # By no more than it takes alone: what is beyond that is another load on the cores.
    longer_s = min(exposed * alone_s - sync_s, alone_s, backward_s)
    if longer_s <= 0:
        return report
    micro_step_s = report.micro_step_s
    if micro_step_s is not None:
        micro_step_s -= min(longer_s / (1 + (report.accumulation or 0)), micro_step_s / 2)
    return dataclasses.replace(
        report,
        backward_s=backward_s - longer_s,
        sync_s=sync_s + longer_s,
        micro_step_s=micro_step_s,
    )
