"""Policy `goodput` where jobs may share GPUs: halves beside whole GPUs in one program."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.gpu_parts import HalfOptions
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.policies.milp.assignment_milp import solve
from tests.support.decisions.synthetic_clusters import node
from tests.unit.policies.goodput.test_marginal_value import cluster, config, first, question


def halves(pairs, *, hosts=(), guests=(), joinable=()):
    """Return options on a100s; pairs: {(job, other): speed of both}."""
    speeds = {("a100", *pair): speed for pair, speed in pairs.items()}
    speeds |= {("a100", b, a): speed for (a, b), speed in pairs.items()}
    return HalfOptions(
        hosts=dict.fromkeys(hosts, "a100"),
        guests=dict.fromkeys(guests, frozenset({"a100"})),
        joinable={"a100": tuple(joinable)},
        speeds=speeds,
    )


def test_two_waiting_jobs_share_a_gpu_so_that_a_third_one_starts():
    made = cluster((None, {}), (None, {}), (None, {}), nodes=[node("n1", gpus=2)])
    options = halves({(1, 2): 0.95}, guests=(1, 2))
    policy = MarginalValue(config())
    chosen, _ = first(policy, question(made, halves=options))
    assert {job: (a.gpus, a.half) for job, a in chosen.items()} == {
        1: (1, True), 2: (0, False), 3: (1, False),
    }  # fmt: skip
    assert chosen[2].reason.code == "half-given-first"
    # The program that is shown is the one that was solved.
    shown = policy.round_program
    assert shown.parts == 2
    assert solve(shown.program, gap=0.0).choice.tolist() == shown.choice.tolist()
    assert shown.program.config_gpus[shown.choice].tolist() == [1, 1, 2]
    assert shown.program.used(shown.choice).tolist() == [4, 0]
    assert chosen[2].reason.parameters["job"] == "1"


def test_jobs_share_no_gpu_where_each_may_have_its_own():
    made = cluster((None, {}), (None, {}), nodes=[node("n1", gpus=2)])
    options = halves({(1, 2): 0.95}, guests=(1, 2))
    chosen, _ = first(MarginalValue(config()), question(made, halves=options))
    assert [(a.gpus, a.half) for a in chosen.values()] == [(1, False), (1, False)]


def test_a_waiting_job_joins_a_running_one_instead_of_taking_a_gpu_that_others_use():
    on = {"n1": 3}, {"n1": 1}, None
    made = cluster(*((held, {}) for held in on), nodes=[node("n1", gpus=4)])
    policy = MarginalValue(config())
    chosen, _ = first(policy, question(made))
    assert chosen[3].gpus > 0
    assert chosen[1].gpus < 3
    options = halves({(2, 3): 0.99}, hosts=(2,), guests=(3,))
    chosen, _ = first(policy, question(made, halves=options))
    assert [a.gpus for a in chosen.values()] == [3, 1, 0]
    assert chosen[3].reason.code == "half-given-first"


def test_a_free_half_beside_a_job_outside_the_question_is_taken():
    made = cluster(({"n1": 1}, {}), (None, {}), (None, {}), nodes=[node("n1", gpus=2)])
    options = halves({(1, 2): 0.95, (1, 3): 0.95}, guests=(2, 3), joinable=(1,))
    asked = question(made, halves=options, jobs=(2, 3), capacity={"a100": 1})
    chosen, _ = first(MarginalValue(config()), asked)
    assert sorted(a.gpus for a in chosen.values()) == [0, 1]


@settings(max_examples=30)
@given(st.data())
def test_halves_keep_to_the_gpus_and_only_jobs_that_may_meet_share_one(data):
    gpus = data.draw(st.integers(1, 4))
    count = data.draw(st.integers(2, 7))
    running = data.draw(st.integers(0, min(gpus, count)))
    on = [{"n1": 1}] * running + [None] * (count - running)
    made = cluster(*((held, {}) for held in on), nodes=[node("n1", gpus=gpus)])
    sharing = data.draw(st.sets(st.integers(1, count)))
    speeds = {
        (a, b): speed
        for a in sharing
        for b in sharing
        if a < b
        and b > running
        and (speed := data.draw(st.sampled_from([None, 0.9, 0.95, 1.0]))) is not None
    }
    # The policy is not asked about the first job, if that has half of a GPU already.
    is_outside = running > 0 and data.draw(st.booleans())
    asked = tuple(range(1 + is_outside, count + 1))
    options = halves(
        speeds,
        hosts=[job for job in asked if job in sharing and job <= running],
        guests=[job for job in asked if job in sharing and job > running],
        joinable=(1,) if is_outside and 1 in sharing else (),
    )
    capacity = {"a100": gpus - is_outside}
    one = question(made, jobs=asked, capacity=capacity, halves=options)
    chosen, _ = first(MarginalValue(config()), one)
    assert sum(a.gpus for a in chosen.values()) <= gpus - is_outside
    met = Counter()
    for job, alternative in chosen.items():
        if alternative.reason.code == "half-given-first":
            other = int(alternative.reason.parameters["job"])
            assert ("a100", job, other) in options.speeds
            assert other in options.joinable["a100"] or chosen[other].gpus == 1
            met[other] += 1
    assert all(times == 1 for times in met.values())
    assert {job for job, a in chosen.items() if a.half} == {j for j in met if j > running}
