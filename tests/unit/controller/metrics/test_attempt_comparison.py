"""Lost steps, and promised and delivered speed, from the reports of two attempts."""

from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.attempt_comparison import AttemptComparison
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report


class Compared:
    def __init__(self):
        self.counts = ActivityCounts()
        self.attempts = AttemptComparison(self.counts)

    def report(self, run, step=None, *, by_change=False, **fields):
        values = {"job_id": 7, "phase": "training", "gpus": 2}  # the type is not always reported
        report = Report(run=run, step=step, **(values | fields))
        held = Allocation.of("a100", {"n1": report.gpus})
        self.attempts.record(report, held, by_change=by_change)

    def grow(self, gain):
        self.attempts.record_prediction(
            Decision(
                job_id=7, current=Allocation.of("a100", {"n1": 2}),
                target=Allocation.of("a100", {"n1": 4}), action=Action.GROW,
                reason=Reason("text", text=""), gain=gain,
            )
        )  # fmt: skip

    @property
    def lost(self):
        return {cause: n for (cause,), n in self.counts.values(metrics.LOST_STEPS).items()}

    @property
    def speeds(self):
        rows = self.counts.histograms(metrics.SPEEDUP).items()
        return {name: h.sum for (name,), h in rows if h.total}


def measured(rate, steps=5):
    return {"step_time_s": 1.0, "global_batch": rate, "steps_measured": steps}


def test_steps_since_the_checkpoint_are_lost_once():
    compared = Compared()
    compared.report(0, 120)
    compared.report(1)  # starting: it has not loaded its checkpoint yet
    compared.report(1, 101, resumed_from=100)
    compared.report(1, 150, resumed_from=100)
    assert compared.lost == {"change": 0, "other": 20}


def test_a_job_that_began_afresh_has_lost_all():
    compared = Compared()
    compared.report(0, 30)
    compared.report(1, 1, by_change=True)
    assert compared.lost == {"change": 30, "other": 0}


def test_a_change_after_a_save_loses_none():
    compared = Compared()
    compared.report(0, 100)
    compared.report(1, 101, resumed_from=100, by_change=True)
    compared.report(0, 999)  # late, of the attempt before
    compared.report(1, 102, resumed_from=100, by_change=True)
    assert compared.lost == {"change": 0, "other": 0}


def test_an_attempt_that_ended_before_its_first_step_hides_nothing():
    compared = Compared()
    compared.report(0, 120)
    compared.report(1)
    compared.report(2, 101, resumed_from=100)
    assert compared.lost == {"change": 0, "other": 20}


def test_checkpoints_of_scripts_are_no_steps():
    compared = Compared()
    compared.report(0, 9, kind="script")
    compared.report(1, 1, kind="script")
    assert compared.lost == {"change": 0, "other": 0}


def test_promised_and_delivered_speed_of_a_change():
    compared = Compared()
    compared.report(0, 10, **measured(100))
    compared.grow(0.8)
    compared.report(1, 11, gpus=4)
    compared.report(1, 12, gpus=4, **measured(999, steps=2))  # too few steps
    assert compared.speeds == {}
    compared.report(1, 20, gpus=4, **measured(150))
    compared.report(1, 30, gpus=4, **measured(160))
    assert compared.speeds == {"promised": 1.8, "delivered": 1.5}


def test_a_change_that_was_given_up_promised_nothing():
    compared = Compared()
    compared.report(0, 10, **measured(100))
    compared.grow(0.8)
    compared.attempts.drop_prediction(7)
    compared.report(1, 20, gpus=4, **measured(150))
    assert compared.speeds == {}


def test_other_gpus_than_promised_are_not_compared():
    compared = Compared()
    compared.report(0, 10, **measured(100))
    compared.grow(0.8)
    compared.report(1, 20, gpus=2, **measured(100))
    assert compared.speeds == {}


def test_jobs_that_are_gone_are_forgotten():
    compared = Compared()
    compared.report(0, 120)
    compared.attempts.forget(set())
    compared.report(1, 101, resumed_from=100)
    assert compared.lost == {"change": 0, "other": 0}
