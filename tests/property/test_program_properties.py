"""Properties of the integer program of a round: feasible, and as good as the reference."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.policies.milp.assignment_milp import AssignmentProgram, solve
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.milp.pulp_backend import PulpBackend


def program(seed, *, jobs, kinds, tight, grid=False, fixed=0.2, limits=0):
    """Draw a program; on a grid, costs tie often. Limits are mostly too small."""
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 4, 8, 12][: int(rng.integers(1, 6))]
    config_type = np.repeat(np.arange(kinds), len(sizes))
    config_gpus = np.tile(sizes, kinds).astype(np.int64)
    cost = rng.uniform(0.1, 1.4, size=(jobs, len(config_gpus)))
    if grid:
        cost = np.round(cost, 1)
    held = rng.integers(0, len(config_gpus), size=jobs)
    return AssignmentProgram(
        cost=cost,
        valid=rng.random(cost.shape) < 0.8,
        config_type=config_type,
        config_gpus=config_gpus,
        capacity=rng.integers(0, max(1, int(jobs * tight)) + 1, size=kinds),
        not_running=1.1,
        fixed=np.where(rng.random(jobs) < fixed, held, -1),
        limits=tuple(_limit(rng, jobs, config_gpus) for _ in range(limits if jobs else 0)),
    )


def _limit(rng, jobs, config_gpus):
    members = np.flatnonzero(rng.random(jobs) < 0.6)
    spared = rng.integers(0, 3, size=len(members))
    use = np.maximum(config_gpus[None, :] - spared[:, None], 0.0) * rng.choice([1.0, 0.7])
    return LimitRow(jobs=members, use=use, left=float(rng.integers(0, 2 * jobs + 1)))


PROGRAMS = st.builds(
    program,
    st.integers(0, 2**32 - 1),
    jobs=st.integers(0, 25),
    kinds=st.integers(1, 4),
    tight=st.floats(0.1, 4.0),
    grid=st.booleans(),
    fixed=st.sampled_from((0.0, 0.2, 1.0)),
)


def check(asked, found):
    """Check what holds for every solution."""
    assert found.choice.shape == (len(asked.cost),)
    assert (asked.used(found.choice) <= asked.capacity).all()
    runs = np.flatnonzero(found.choice >= 0)
    fixed = (asked.fixed >= 0) & ~np.isin(np.arange(len(asked.fixed)), found.relaxed)
    assert (found.choice[fixed] == asked.fixed[fixed]).all()
    free = runs[~fixed[runs]]
    assert asked.valid[free, found.choice[free]].all()
    assert (asked.cost[free, found.choice[free]] < asked.not_running).all()
    assert found.objective == asked.objective(found.choice)
    assert found.bound <= found.objective


@settings(max_examples=40)
@given(PROGRAMS)
def test_it_fits_and_fixed_jobs_keep_theirs(asked):
    found = solve(asked)
    check(asked, found)
    assert found.proven
    assert not found.limit_hit


@settings(max_examples=40)
@given(PROGRAMS, st.sampled_from((0.0, -1.0, 1e-9, 1e-3)))
def test_at_the_time_limit_it_still_fits(asked, limit):
    check(asked, solve(asked, time_limit_s=limit))


@settings(max_examples=40)
@given(PROGRAMS, st.integers(0, 5))
def test_the_same_seed_gives_the_same_answer(asked, seed):
    first, second = solve(asked, seed=seed), solve(asked, seed=seed)
    assert (first.choice == second.choice).all()
    assert (first.objective, first.bound) == (second.objective, second.bound)


@settings(max_examples=40)
@given(PROGRAMS, st.integers(0, 24))
def test_removing_a_job_leaves_an_answer_that_costs_no_more_for_the_others(asked, gone):
    if gone >= len(asked.cost):
        return
    stays = np.arange(len(asked.cost)) != gone
    fewer = AssignmentProgram(
        cost=asked.cost[stays],
        valid=asked.valid[stays],
        config_type=asked.config_type,
        config_gpus=asked.config_gpus,
        capacity=asked.capacity,
        not_running=asked.not_running,
        fixed=asked.fixed[stays],
    )
    whole, rest = solve(asked, gap=0.0), solve(fewer, gap=0.0)
    check(fewer, rest)
    if not whole.relaxed and not rest.relaxed:
        assert rest.objective <= asked.objective(whole.choice) - share(asked, whole, gone) + 1e-5


def share(asked, found, job):
    config = found.choice[job]
    return asked.cost[job, config] if config >= 0 else asked.not_running


@settings(max_examples=25)
@given(PROGRAMS)
def test_it_is_as_good_as_the_reference(asked):
    found = solve(asked, gap=0.0)
    if found.relaxed:
        return  # the reference has no answer then
    objective = asked.objective(PulpBackend("CBC").choose(asked))
    assert abs(found.objective - objective) < 1e-5
    assert found.bound <= objective + 1e-6


@settings(max_examples=40)
@given(
    st.builds(
        program,
        st.integers(0, 2**32 - 1),
        jobs=st.integers(0, 15),
        kinds=st.integers(1, 3),
        tight=st.floats(0.5, 4.0),
        fixed=st.sampled_from((0.0, 0.2)),
        limits=st.integers(1, 3),
    ),
    st.sampled_from((10.0, 0.0)),
)
def test_it_keeps_to_limits_and_is_as_good_as_the_reference(asked, time_limit_s):
    found = solve(asked, gap=0.0, time_limit_s=time_limit_s)
    check(asked, found)
    fixed = np.where(np.isin(np.arange(len(asked.fixed)), found.relaxed), -1, asked.fixed)
    for limit in asked.limits:
        assert limit.used(found.choice) <= max(limit.left, limit.used(fixed)) + 1e-6
    if found.relaxed or not time_limit_s:
        return
    objective = asked.objective(PulpBackend("CBC").choose(asked))
    assert abs(found.objective - objective) < 1e-5
    assert found.bound <= objective + 1e-6


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.integers(150, 600), st.floats(0.2, 3.0), st.booleans())
def test_the_sample_s_prices_lead_to_the_same_answer(seed, jobs, tight, grid):
    asked = program(seed, jobs=jobs, kinds=3, tight=tight, grid=grid)
    found = solve(asked, gap=1e-3)
    check(asked, found)
    assert found.proven
