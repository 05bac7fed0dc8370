import json

import pytest

from slurm_elastic.controller.state.trials.plan_trials import MARGIN, REPORTS, PlanTrials
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.plan_gains import PlanKind
from slurm_elastic.core.execution.possible_plans import PlanCandidates
from slurm_elastic.core.execution.supported_options import SupportedOptions
from slurm_elastic.core.report import Report

ABLE = SupportedOptions(tensor=True, shard=True)
BATCH = 32
AUTO = Directive.parse("1-16,plan=auto")
GB = 10**9


class Job:
    """A job that trains in the plan that is ordered, at speeds by plan in samples/s."""

    def __init__(self, speeds: dict[str, float], *, gpus: int = 4, share: float = 0.05) -> None:
        self.trials = PlanTrials()
        self.speeds, self.share = speeds, share
        self.now, self.run = 1000.0, 0
        self.hold(gpus)
        self.report("starting")

    def hold(self, gpus: int) -> None:
        self.held = Allocation.of("a100", {"n1": gpus})
        self.text = self.trials.ordered or f"{gpus}x1"

    def report(self, phase: str = "training", **fields) -> Report:
        plan = "+" in self.text
        values = {
            "step_time_s": BATCH / self.speeds[self.text] if phase == "training" else None,
            "steps_measured": 5,
            "global_batch": BATCH,
            "layout": self.text.partition("+")[0],
            "plan": self.text if plan else "",
            "gpus": self.held.gpus,
            "supported_options": str(ABLE),
        }
        report = Report(job_id=7, run=self.run, phase=phase, **values | fields)
        self.trials.record(report, self.held)
        return report

    @property
    def candidates(self) -> PlanCandidates:
        return PlanCandidates(AUTO, self.trials.supported, (self.held.gpus,))

    def choose(self) -> bool:
        return self.trials.choose(
            self.candidates, self.held, now=self.now, restart_s=2.0, share=self.share
        )

    def run_out_of_memory(self, start: int) -> bool:
        """Fail in the present plan before the first step; return whether another is ordered."""
        report = Report(
            job_id=7, run=self.run, phase="ended", exit_code=1, failed_start=start,
            gpus=self.held.gpus, out_of_memory=True,
        )  # fmt: skip
        answer = self.trials.lack_memory(report, self.candidates, self.held, self.now)
        self.text = self.trials.ordered or f"{self.held.gpus}x1"
        return answer

    def go(self, seconds: float) -> list[tuple[float, str]]:
        """Report every ten seconds; return when which plan was ordered."""
        orders, end, began = [], self.now + seconds, self.now
        while self.now < end:
            self.now += 10
            self.report()
            if self.choose():
                orders.append((self.now - began, self.trials.ordered))
                self.text = self.trials.ordered or f"{self.held.gpus}x1"
                self.report("starting")
        return orders


def test_every_plan_is_tried_and_the_fastest_kept():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 130.0, "1x1+tensor=4": 90.0})
    job.choose()
    orders = job.go(600)
    # A slower plan is left after three reports, the next one tried when restarts cost 5 % again.
    assert [text for _, text in orders] == [
        "4x1+shard=full",
        "",
        "2x1+tensor=2",
        "1x1+tensor=4",
        "2x1+tensor=2",
    ]
    assert job.go(3000) == []
    (gain,) = {g.gain for g in job.trials.gains().rows if g.kind == PlanKind(tensor=2)}
    assert gain == 1.3


def test_restarts_for_trials_take_at_most_their_share_of_the_time():
    job = Job(dict.fromkeys(("4x1", "4x1+shard=full", "2x1+tensor=2", "1x1+tensor=4"), 100.0))
    job.choose()
    times = [at for at, _ in job.go(1000)]
    assert len(times) == 3
    assert min(b - a for a, b in zip([0.0, *times], times, strict=False)) >= 2.0 / 0.05


def test_without_a_share_nothing_is_tried():
    job = Job({"4x1": 100.0}, share=0.0)
    job.choose()
    assert job.go(3000) == []


def test_a_plan_that_is_hardly_faster_does_not_replace_another():
    job = Job({"4x1": 100.0, "4x1+shard=full": 104.0, "2x1+tensor=2": 103.0, "1x1+tensor=4": 50.0})
    job.choose()
    job.go(1000)
    assert job.trials.ordered != "1x1+tensor=4"
    speed = job.speeds[job.trials.ordered or "4x1"]
    assert speed * MARGIN >= 104.0


def test_a_new_allocation_begins_with_the_plan_that_gained_most_in_a_similar_one():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 130.0, "1x1+tensor=4": 90.0,
               "8x1": 150.0, "4x1+tensor=2": 240.0, "1x1+tensor=8": 9.0})  # fmt: skip
    job.choose()
    job.go(600)
    job.hold(8)
    job.run += 1
    assert job.choose()
    assert job.trials.ordered == "4x1+tensor=2"
    job.hold(8)
    job.report("starting")
    job.go(400)
    # The own choice was measured there, too, and the gain is now the one of this size.
    rows = {(g.gpus, g.kind.tensor): g.gain for g in job.trials.gains().rows}
    assert rows[8, 2] == 1.6
    assert job.trials.ordered == "4x1+tensor=2"
    job.hold(1)
    assert job.choose()
    assert job.trials.ordered == ""


def test_a_plan_in_which_the_program_fails_is_withdrawn_and_not_tried_again():
    job = Job({"4x1": 100.0, "2x1+tensor=2": 90.0, "1x1+tensor=4": 90.0})
    job.choose()
    while not job.trials.ordered:
        job.go(10)
    assert job.trials.ordered == "4x1+shard=full"
    failed = Report(job_id=7, run=0, phase="ended", exit_code=1, failed_start=2, gpus=4)
    assert job.trials.fail(failed, job.held, job.now)
    assert job.trials.fail(failed, job.held, job.now), "the report comes again until it is answered"
    assert job.trials.ordered == ""
    assert not job.trials.fail(Report(**{**vars_of(failed), "failed_start": 3}), job.held, job.now)
    job.text = "4x1"
    job.report("starting")
    assert "4x1+shard=full" not in [text for _, text in job.go(1000)]


def test_after_a_failure_the_plan_before_is_ordered_again():
    job = Job({"4x1": 100.0, "4x1+shard=full": 130.0, "2x1+tensor=2": 90.0, "1x1+tensor=4": 90.0})
    job.choose()
    while job.trials.ordered != "2x1+tensor=2":
        job.go(10)
    failed = Report(job_id=7, run=0, phase="ended", exit_code=1, failed_start=3, gpus=4)
    assert job.trials.fail(failed, job.held, job.now)
    assert job.trials.ordered == "4x1+shard=full"


def vars_of(report: Report) -> dict:
    return {name: getattr(report, name) for name in report.__dataclass_fields__}


def test_a_failure_in_a_plan_that_has_worked_is_not_the_plans():
    job = Job({"4x1": 100.0, "4x1+shard=full": 130.0, "2x1+tensor=2": 90.0, "1x1+tensor=4": 90.0})
    job.choose()
    job.go(600)
    assert job.trials.ordered == "4x1+shard=full"
    failed = Report(job_id=7, run=0, phase="ended", exit_code=1, failed_start=9, gpus=4)
    assert not job.trials.fail(failed, job.held, job.now)


@pytest.mark.parametrize(
    ("fields", "gpus"),
    [
        ({"layout": "4x1"}, 4),  # it ran in its own choice still
        ({"layout": "2x1", "plan": "2x1+tensor=2"}, 4),  # in one that nobody has ordered here
        ({}, 2),  # on other GPUs than those for which the plan was ordered
        ({"layout": "4x1"}, None),
    ],
)
def test_a_plan_is_not_to_blame_for_a_failure_elsewhere(fields, gpus):
    job = Job({"4x1": 100.0})
    job.choose()
    while not job.trials.ordered:
        job.go(10)
    held = Allocation.of("a100", {"n1": gpus}) if gpus else None
    failed = Report(job_id=7, run=0, phase="ended", exit_code=1, failed_start=2, gpus=4, **fields)
    assert not job.trials.fail(failed, held, job.now)
    assert job.trials.ordered == "4x1+shard=full"
    assert job.trials.failures.in_doubt(("a100", 4, 1)) == ()


def test_a_plan_that_fails_in_one_size_is_tried_in_others_until_it_is_to_blame():
    job = Job({"4x1": 100.0, "8x1": 100.0, "2x1+tensor=2": 90.0, "1x1+tensor=4": 90.0})
    job.choose()
    while not job.trials.ordered:
        job.go(10)
    kind = PlanKind.of(ExecutionPlan.parse(job.trials.ordered))
    failed = Report(job_id=7, run=0, phase="ended", exit_code=1, failed_start=2, gpus=4)
    assert job.trials.fail(failed, job.held, job.now)
    assert job.trials.failures.blamed == set()
    assert not job.trials.failures.excludes(("a100", 8, 1), kind)
    assert "failed" in job.trials.results()
    job.text = "4x1"
    job.report("starting")
    job.go(10 * REPORTS)
    assert job.trials.failures.blamed == {kind}


def test_times_of_a_plan_count_for_models_of_the_own_choice_by_its_gain():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 130.0, "1x1+tensor=4": 90.0})
    job.choose()
    job.go(600)
    assert job.trials.ordered == "2x1+tensor=2"
    own, held = job.trials.as_own(job.report(), job.held)
    assert held is job.held
    assert BATCH / own.step_time_s == pytest.approx(100.0, rel=0.01)
    assert not own.plan


def test_a_plan_that_is_not_possible_any_more_is_left():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 130.0, "1x1+tensor=4": 90.0})
    job.choose()
    job.go(600)
    assert job.trials.ordered == "2x1+tensor=2"
    without_tensor = PlanCandidates(AUTO, SupportedOptions(shard=True), (4,))
    assert job.trials.choose(without_tensor, job.held, now=job.now, restart_s=2.0, share=0.05)
    assert job.trials.ordered == ""


def test_reports_of_the_old_plan_do_not_count_for_the_new_one():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0})
    job.choose()
    while not job.trials.ordered:
        job.now += 10
        job.report()
        job.choose()
    late = job.report()  # its ranks have not restarted yet
    assert job.trials.as_own(late, job.held)[1] is None
    assert {key[4] for key in job.trials.speeds.samples_per_s} == {"", "4x1"}


def test_it_survives_the_ledger_and_unreadable_rows():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 130.0, "1x1+tensor=4": 90.0})
    job.choose()
    job.go(300)
    body = json.loads(json.dumps(job.trials.to_body()))
    assert PlanTrials.from_body(body) == job.trials
    for wrong in (
        None,
        [],
        {"ordered": "4x"},
        {**body, "speeds": [["a100", 4, 1]]},
        {"failed": [1]},
        {"doubtful": [["a100", 4, 1, "4x", True]]},
        {"lost_in": 1},
    ):
        assert PlanTrials.from_body(wrong) == PlanTrials()


def test_plans_that_those_measured_show_to_be_slower_are_not_tried():
    able = SupportedOptions(tensor=True, shard=True, mesh=True)
    speeds = {
        "8x1": 100.0, "8x1+shard=full": 96.0, "4x1+tensor=2": 60.0, "4x1+tensor=2+shard=full": 58.0,
        "2x1+tensor=4": 30.0, "2x1+tensor=4+shard=full": 30.0, "1x1+tensor=8": 15.0,
    }  # fmt: skip
    job = Job(speeds, gpus=8)
    job.trials.supported = able
    job.report("starting", supported_options=str(able))
    job.choose()
    tried = set()
    for _ in range(200):
        job.now += 10
        job.report(supported_options=str(able))
        if job.choose():
            tried.add(job.trials.ordered)
            job.text = job.trials.ordered or "8x1"
            job.report("starting", supported_options=str(able))
    assert tried == {"", "8x1+shard=full", "4x1+tensor=2", "4x1+tensor=2+shard=full"}
    assert job.trials.ordered == ""


class SmallGpus(Job):
    """A job that has trained on 4 GPUs, with 8 of 12 GB for its samples there."""

    def __init__(self, speeds: dict[str, float]) -> None:
        super().__init__({"4x1": 100.0} | speeds)
        self.choose()
        for _ in range(REPORTS):
            self.report(weight_bytes=GB, optimizer_bytes=2 * GB, peak_memory_bytes=12 * GB)
        self.run += 1
        self.hold(2)


def test_a_size_at_which_memory_lacks_goes_on_in_a_plan_that_needs_less():
    job = SmallGpus(
        {"2x1+accumulation=1": 45.0, "2x1+shard=full": 20.0, "1x1+tensor=2+accumulation=1": 20.0}
    )
    assert not job.choose()
    assert job.run_out_of_memory(1)
    assert job.run_out_of_memory(1), "the report comes again until it is answered"
    assert job.trials.ordered == "2x1+accumulation=1"
    job.report("starting")
    assert job.go(30) == []
    # Its times are those of this size for models, as those of the own choice elsewhere.
    own, held = job.trials.as_own(job.report(), job.held)
    assert (own.step_time_s, own.plan, held) == (BATCH / 45.0, "", job.held)
    # Others are compared with it; the own choice is not tried again.
    assert {text for _, text in job.go(3000)} == job.speeds.keys() - {"4x1"}
    assert job.trials.ordered == "2x1+accumulation=1"
    gains = {row.kind.tensor: row.gain for row in job.trials.gains().rows}
    assert gains[2] == round(20.0 / 45.0, 2)


def test_a_faster_plan_that_fits_replaces_the_one_that_stood_in():
    job = SmallGpus(
        {"2x1+accumulation=1": 45.0, "1x1+tensor=2+accumulation=1": 60.0, "2x1+shard=full": 20.0}
    )
    job.choose()
    assert job.run_out_of_memory(1)
    job.report("starting")
    job.go(2000)
    assert job.trials.ordered == "1x1+tensor=2+accumulation=1"


def test_the_size_below_begins_with_a_plan_that_fits():
    job = SmallGpus({})
    job.choose()
    assert job.run_out_of_memory(1)
    job.run += 1
    job.hold(1)
    assert job.choose()
    assert job.trials.ordered == "1x1+accumulation=3"
    job.hold(4)
    assert job.choose()
    assert job.trials.ordered == "", "where it fits, the own choice stands"


def test_a_plan_on_trial_that_lacks_memory_is_left_for_the_one_before_on_these_gpus_only():
    job = Job({"4x1": 100.0, "4x1+shard=full": 80.0, "2x1+tensor=2": 90.0, "1x1+tensor=4": 90.0})
    job.choose()
    while job.trials.ordered != "4x1+shard=full":
        job.go(10)
    assert job.run_out_of_memory(2)
    assert job.trials.ordered == ""
    job.report("starting")
    assert "4x1+shard=full" not in [text for _, text in job.go(2000)]
    assert job.trials.failures.blamed == set(), "elsewhere it may fit"


def test_where_no_plan_fits_the_failure_is_that_of_the_size():
    job = SmallGpus({})
    job.choose()
    starts = 1
    while job.run_out_of_memory(starts):
        starts += 1
        assert starts < 8
    assert starts > 2
    job.run += 1
    assert not job.run_out_of_memory(1), "nor later"


def test_a_plan_that_stood_in_and_fails_otherwise_is_not_ordered_again():
    job = SmallGpus({})
    job.choose()
    assert job.run_out_of_memory(1)
    failed = Report(job_id=7, run=job.run, phase="ended", exit_code=1, failed_start=2, gpus=2)
    assert not job.trials.fail(failed, job.held, job.now)
    job.choose()
    assert job.trials.ordered not in ("", "2x1+accumulation=1")


def test_a_plan_that_stood_in_and_fails_otherwise_does_not_count_as_too_large():
    job = SmallGpus({})
    job.choose()
    assert job.run_out_of_memory(1)
    failed = Report(job_id=7, run=job.run, phase="ended", exit_code=1, failed_start=2, gpus=2)
    assert not job.trials.fail(failed, job.held, job.now)
    assert [row.plan for row in job.trials.memory.oversized()] == [""]


def test_a_lack_of_memory_counts_for_the_plan_in_which_it_came():
    job = SmallGpus({"2x1": 50.0, "2x1+shard=full": 60.0})
    job.choose()
    job.text = "2x1"
    job.report("starting")
    while not job.trials.ordered:
        job.go(10)
    late = Report(
        job_id=7, run=job.run, phase="ended", exit_code=1, failed_start=2, gpus=2, layout="2x1",
        out_of_memory=True,
    )  # fmt: skip
    assert job.trials.lack_memory(late, job.candidates, job.held, job.now)
    assert [row.plan for row in job.trials.memory.oversized()] == [""]


def test_a_size_at_which_companions_lacked_memory_begins_with_a_plan_that_needs_less():
    job = SmallGpus({})
    job.hold(1)
    job.choose()
    two = ("a100", 2, 1)
    grown = PlanCandidates(AUTO, job.trials.supported, (2,))
    assert job.trials.lose_companion(job.run, 5, two, grown)
    assert not job.trials.lose_companion(job.run, 5, two, grown), "the report comes again"
    job.hold(2)
    assert job.choose()
    assert job.trials.ordered == "2x1+accumulation=1"
    # There, too, and in another change.
    assert job.trials.lose_companion(job.run, 6, two, grown)
    assert PlanTrials.from_body(json.loads(json.dumps(job.trials.to_body()))) == job.trials
    assert job.choose()
    assert job.trials.ordered not in ("", "2x1+accumulation=1")


def test_ranks_that_lack_memory_just_after_those_of_a_companion_are_started_again():
    job = SmallGpus({})
    job.choose()
    assert job.trials.lose_companion(job.run, 5, ("a100", 2, 1), job.candidates)
    report = Report(
        job_id=7, run=job.run, phase="ended", exit_code=1, failed_start=1, gpus=1, failed_gpus=2,
        out_of_memory=True, change=5,
    )  # fmt: skip
    assert job.trials.lack_memory(report, job.candidates, job.held, job.now)
    assert job.trials.ordered == "2x1+accumulation=1"


def test_the_next_job_begins_with_what_did_not_fit():
    job = SmallGpus({})
    job.choose()
    assert job.run_out_of_memory(1)
    results = json.loads(json.dumps(job.trials.results()))
    following = SmallGpus({})
    following.trials = PlanTrials()
    following.trials.begin_with(results)
    following.report("starting")
    assert following.choose()
    assert following.trials.ordered == "2x1+accumulation=1"
    body = json.loads(json.dumps(job.trials.to_body()))
    assert PlanTrials.from_body(body) == job.trials


def test_speeds_of_few_reports_are_not_shown():
    job = Job({"4x1": 100.0})
    job.choose()
    for _ in range(REPORTS - 1):
        job.report()
    assert job.trials.speeds.measured() == ()
    job.report()
    assert {row.plan for row in job.trials.speeds.measured()} == {"", "4x1"}
    assert ExecutionPlan.parse("4x1").plain
