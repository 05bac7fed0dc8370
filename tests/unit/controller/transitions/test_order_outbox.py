"""What jobs are told beside what they are asked."""

import pytest

from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.core.report import Orders


@pytest.mark.parametrize(("jobs", "every_s"), [(0, 10.0), (200, 10.0), (500, 20.0), (9000, 45.0)])
def test_the_more_jobs_report_the_less_often_each_does(jobs, every_s):
    outbox = OrderOutbox()
    outbox.pace(jobs)
    assert outbox.orders(7, 0).report_every_s == every_s
    outbox.ask(7, Orders(action="notice", notice=3), run=0)
    assert (outbox.orders(7, 0).action, outbox.orders(7, 0).report_every_s) == ("notice", every_s)
