"""Which plans are to blame for a program that fails."""

import doctest

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.state.trials import plan_failures
from slurm_elastic.controller.state.trials.plan_failures import PlanFailures
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.plan_gains import PlanKind
from slurm_elastic.core.report import Report
from tests.unit.controller.state.trials.test_plan_trials import Job

FOUR = ("a100", 4, 1)
KINDS = [PlanKind(tensor=2), PlanKind(tensor=4), PlanKind.of(ExecutionPlan.parse("2x1+shard=full"))]
sizes = st.sampled_from([2, 4, 8])


def test_examples():
    assert doctest.testmod(plan_failures).failed == 0


def test_a_plan_is_not_to_blame_for_a_size_in_which_others_fail_too():
    failures = PlanFailures()
    failures.doubt(FOUR, "2x1+tensor=2")
    failures.record_other_cause(FOUR)
    failures.blame(FOUR, trained=[])
    assert failures.blamed == set()
    assert failures.excludes(FOUR, PlanKind(tensor=2)), "there it is not tried again"
    assert PlanFailures.from_body(failures.to_body()) == failures


@given(
    bad_sizes=st.sets(sizes),
    bad_kinds=st.sets(st.sampled_from(KINDS)),
    bad_pairs=st.sets(st.tuples(sizes, st.sampled_from(KINDS))),
    walk=st.lists(sizes, min_size=1, max_size=5),
)
def test_only_plans_that_fail_where_others_train_are_blamed(bad_sizes, bad_kinds, bad_pairs, walk):
    job = Job({}, gpus=walk[0])

    def fails(kind):
        gpus = job.held.gpus
        return gpus in bad_sizes or kind in bad_kinds or (gpus, kind) in bad_pairs

    def follow():
        job.text = job.trials.ordered or f"{job.held.gpus}x1"
        job.speeds[job.text] = 100.0
        job.report("starting")

    for gpus in walk:
        job.hold(gpus)
        job.run += 1
        job.choose()
        follow()
        start = 0
        for _ in range(80):
            job.now += 20
            if fails(PlanKind.of(ExecutionPlan.parse(job.text))):
                start += 1
                ended = Report(
                    job_id=7, run=job.run, phase="ended", exit_code=1, failed_start=start, gpus=gpus
                )
                if not job.trials.fail(ended, job.held, job.now):
                    break  # the size is barred
            else:
                job.report()
                job.choose()
            follow()
        assert start <= len(KINDS) + 1
    trained = set(job.trials.speeds.kinds())
    for kind in job.trials.failures.blamed:
        assert kind not in trained
        assert kind in bad_kinds or any((g, kind) in bad_pairs for g in set(walk) - bad_sizes)
