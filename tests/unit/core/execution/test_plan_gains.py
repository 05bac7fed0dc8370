from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.plan_gains import PlanGain, PlanGains, PlanKind

PAIRS = PlanKind(tensor=2)
GAINS = PlanGains(
    (
        PlanGain("a100", 4, 1, PAIRS, 1.5),
        PlanGain("a100", 8, 2, PAIRS, 0.8),
        PlanGain("a100", 8, 2, PlanKind(stages=4), 2.0),
    )
)


def test_plans_of_one_kind_differ_in_their_replicas_only():
    kinds = {PlanKind.of(ExecutionPlan.parse(t)) for t in ("1x1+tensor=2", "4x1+tensor=2")}
    assert kinds == {PAIRS}
    assert PlanKind.of(ExecutionPlan.parse("2x2")) != PlanKind.of(ExecutionPlan.parse("4x1"))


def test_the_most_similar_allocation_counts():
    assert GAINS.of(PAIRS, "a100", nodes=1, gpus=2) == 1.5
    assert GAINS.of(PAIRS, "a100", nodes=1, gpus=8) == 1.5
    assert GAINS.of(PAIRS, "a100", nodes=2, gpus=16) == 0.8
    assert GAINS.of(PAIRS, "v100", nodes=1, gpus=4) == 1.5


def test_nothing_is_known_far_from_every_measurement():
    assert GAINS.of(PAIRS, "a100", nodes=2, gpus=64) is None
    assert GAINS.of(PlanKind(stages=2), "a100", nodes=1, gpus=4) is None


def test_the_best_plan_counts_where_it_fits_and_none_is_worse_than_the_own_choice():
    assert GAINS.factor("a100", nodes=1, gpus=4) == 2.0
    assert GAINS.factor("a100", nodes=2, gpus=6) == 1.0  # three GPUs on each node, no four stages
    assert GAINS.factor("a100", nodes=1, gpus=2) == 1.5
    assert GAINS.factor("a100", nodes=4, gpus=64) == 1.0
