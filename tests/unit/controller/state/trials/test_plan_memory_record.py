"""Plans that stand in where a job's own choice does not fit into memory."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.state.trials.plan_memory_record import PlanMemoryRecord
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.possible_plans import PlanCandidates
from slurm_elastic.core.execution.supported_options import SupportedOptions
from slurm_elastic.core.report import Report
from slurm_elastic.models.execution.measured_memory import MeasuredMemory

AUTO = Directive.parse("1-16,plan=auto")
ABLE = SupportedOptions(tensor=True, shard=True, recomputable=True)
GB = 10**9
BATCH = 32


def candidates(gpus, supported=ABLE):
    return PlanCandidates(AUTO, supported, (gpus,))


def report(**fields):
    values = {"weight_bytes": GB, "global_batch": BATCH, "gpu_type": "a100"}
    return Report(job_id=7, run=0, phase="training", **values | fields)


def measured(*, gpus=4, peak_gb=12.0, **fields):
    """Return a record of a job whose state takes 4 GB, after a report of its own choice."""
    record = PlanMemoryRecord()
    own = ExecutionPlan.parse(f"{gpus}x1")
    record.record(
        report(peak_memory_bytes=int(peak_gb * GB), optimizer_bytes=2 * GB, **fields), own, "a100"
    )
    return record


def test_the_own_choice_fits_as_long_as_nothing_speaks_against_it():
    assert PlanMemoryRecord().stand_in(("a100", 4, 1), candidates(4)) == ""
    assert measured().stand_in(("a100", 1, 1), candidates(1)) == ""


def test_where_the_gpus_memory_is_known_a_size_begins_with_a_plan_that_fits():
    record = measured(gpu_bytes=16 * GB)  # 8 samples take 8 GB
    assert record.predicted(ExecutionPlan.parse("2x1"), BATCH) == 20 * GB
    assert record.stand_in(("a100", 4, 1), candidates(4)) == ""
    assert record.stand_in(("a100", 2, 1), candidates(2)) == "2x1+accumulation=1"
    assert record.stand_in(("a100", 1, 1), candidates(1)) == "1x1+accumulation=3"
    assert record.stand_in(("v100", 1, 1), candidates(1)) == "", "its memory is not known"


def test_what_failed_on_few_gpus_does_not_begin_on_fewer():
    record = measured()
    assert record.fail(("a100", 2, 1), "", ExecutionPlan.parse("2x1"))
    assert record.stand_in(("a100", 2, 1), candidates(2)) == "2x1+accumulation=1"
    assert record.stand_in(("a100", 1, 1), candidates(1)) == "1x1+accumulation=3"
    assert record.stand_in(("a100", 4, 1), candidates(4)) == ""
    assert record.stand_in(("v100", 1, 1), candidates(1)) == ""


def test_a_stand_in_that_fails_gives_way_to_one_that_needs_less():
    record, shape = measured(), ("a100", 2, 1)
    record.fail(shape, "", ExecutionPlan.parse("2x1"))
    seen = []
    while text := record.stand_in(shape, candidates(2)):
        seen.append(text)
        assert record.fail(shape, text, ExecutionPlan.parse(text))
    needed = [record.predicted(ExecutionPlan.parse(text), BATCH) for text in seen]
    assert needed == sorted(needed, reverse=True)
    assert seen[0] == "2x1+accumulation=1"
    assert 2 <= len(seen) <= 4, seen
    assert text is None


def test_state_that_is_too_large_is_divided():
    record = measured(peak_gb=4.1, gpu_bytes=3 * GB)
    text = record.stand_in(("a100", 4, 1), candidates(4))
    assert "shard=full" in text or "tensor" in text
    only_samples = PlanCandidates(AUTO, SupportedOptions(), (4,))
    assert record.stand_in(("a100", 8, 1), only_samples) is not None, "the least is tried"


def test_a_smaller_batch_may_fit_again():
    record, shape = measured(), ("a100", 2, 1)
    record.fail(shape, "", ExecutionPlan.parse("2x1"))
    record.record(report(global_batch=BATCH // 2), None, "a100")
    assert record.stand_in(shape, candidates(2)) == ""


def test_what_a_plan_with_recomputation_needs_does_not_replace_what_was_measured():
    record = measured()
    before = record.predicted(ExecutionPlan.parse("2x1"), BATCH)
    plan = ExecutionPlan.parse("2x1+recompute")
    record.record(report(plan=str(plan), peak_memory_bytes=9 * GB), plan, "a100")
    assert record.predicted(ExecutionPlan.parse("2x1"), BATCH) == before


def test_without_the_size_of_the_model_nothing_is_known():
    record = PlanMemoryRecord()
    record.record(Report(job_id=7, run=0, phase="training", global_batch=8), None, "a100")
    record.fail(("a100", 2, 1), "", ExecutionPlan.parse("2x1"))
    assert record.stand_in(("a100", 2, 1), candidates(2)) is None


def test_it_survives_the_ledger_and_unreadable_rows():
    record = measured(gpu_bytes=16 * GB)
    record.fail(("a100", 2, 1), "", ExecutionPlan.parse("2x1"))
    record.stand_in(("a100", 2, 1), candidates(2))
    body = json.loads(json.dumps(record.to_body()))
    assert PlanMemoryRecord.from_body(body) == record
    for wrong in (
        None,
        [],
        {**body, "weights": "x"},
        {**body, "failures": [["a100", 2, 1, "", 8, "2x"]]},
        {**body, "stand_ins": [[1]]},
        {**body, "gpu_bytes": 3},
    ):
        assert PlanMemoryRecord.from_body(wrong) == PlanMemoryRecord()


sizes = st.integers(10**6, 10**12)


@given(
    truth=st.builds(
        MeasuredMemory, weights=sizes, optimizer=sizes, sample=sizes, layers=st.integers(1, 48)
    ),
    gpu_bytes=sizes,
    gpus=st.sampled_from([1, 2, 4, 8]),
    supported=st.builds(
        SupportedOptions,
        tensor=st.booleans(),
        shard=st.booleans(),
        recompute=st.booleans(),
        recomputable=st.booleans(),
    ),
    tells=st.booleans(),
    peak=st.none() | sizes,
)
def test_a_job_ends_in_a_plan_that_fits_or_gives_up_after_few_failures(
    truth, gpu_bytes, gpus, supported, tells, peak
):
    record, shape = PlanMemoryRecord(), ("a100", gpus, 1)
    known = candidates(gpus, supported)
    fields = {"weight_bytes": int(truth.weights), "peak_memory_bytes": peak}
    fields |= {"gpu_bytes": gpu_bytes} if tells else {}
    record.record(report(**fields), known.own, "a100")
    failures = []
    while (text := record.stand_in(shape, known)) is not None:
        plan = ExecutionPlan.parse(text) if text else known.own
        assert plan.world == gpus
        if truth.gpu_bytes(plan, batch=BATCH) <= gpu_bytes:
            return
        assert text not in failures
        failures.append(text)
        assert record.fail(shape, text, plan)
        assert len(failures) <= 5
    assert failures or tells


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_smaller_plan_can_be_ordered(gpus):
    for plan in candidates(gpus).smaller(BATCH):
        assert ExecutionPlan.parse(str(plan)) == plan
        assert not plan.obstacle_to_training()
        assert plan.world == gpus
        assert not plan.plain
