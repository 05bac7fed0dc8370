"""Who may be asked to save: those whose GPUs are free, and rings."""

import dataclasses

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.admission import admitted, hopeless
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason

SIZES = {"n1": 4, "n2": 4, "n3": 4}


def allocation(shares):
    return Allocation.of("a100", shares) if shares else None


def job(job_id, shares):
    return Job(
        job_id=job_id,
        display_id=str(job_id),
        name="",
        user="alice",
        uid=1,
        state=JobState.RUNNING,
        partition="gpu",
        allocation=allocation(shares),
    )


def move(job_id, old, target, state=TransitionState.RESERVE):
    return Transition(
        id=job_id,
        job_id=job_id,
        display_id=str(job_id),
        key=str(job_id),
        user="alice",
        uid=1,
        action=Action.MOVE,
        run=0,
        old=allocation(old),
        target=allocation(target),
        reason=Reason("waits"),
        reservation="r",
        state=state,
    )


def chosen(transitions, others=()):
    jobs = {t.job_id: job(t.job_id, dict(t.old.shares) if t.old else {}) for t in transitions}
    jobs |= {j.job_id: j for j in others}
    return set(admitted(transitions, jobs, SIZES))


def test_free_gpus_admit_and_held_ones_do_not():
    grow = move(1, {"n1": 2}, {"n1": 4})
    assert chosen([grow]) == {1}
    assert chosen([grow], [job(9, {"n1": 1})]) == set()


def test_two_do_not_get_the_same_gpus():
    both = [move(1, {"n1": 4}, {"n3": 3}), move(2, {"n2": 4}, {"n3": 3})]
    assert len(chosen(both)) == 1


def test_who_waits_for_a_giver_comes_after_it():
    giver, taker = move(1, {"n1": 4}, {"n2": 1}), move(2, {"n3": 4}, {"n1": 4})
    assert chosen([giver, taker]) == {1}


def test_a_ring_goes_together():
    ring = [
        move(1, {"n1": 4}, {"n2": 4}),
        move(2, {"n2": 4}, {"n3": 4}),
        move(3, {"n3": 4}, {"n1": 4}),
    ]
    assert chosen(ring) == {1, 2, 3}
    assert chosen(ring[:2], [job(3, {"n3": 4})]) == set()


def test_gpus_on_their_way_to_somebody_are_taken():
    ahead = move(1, {"n1": 4}, {"n2": 4}, state=TransitionState.COOL)
    assert chosen([ahead, move(2, {"n3": 1}, {"n2": 1})]) == set()


def test_a_transition_survives_the_ledger():
    t = dataclasses.replace(move(1, {"n1": 4}, {"n2": 4}), entered={"NOTIFY": 1.0, "saved": 1.5})
    again = Transition.from_body(t.to_body())
    assert again == t
    assert again.seconds()["checkpoint"] == 0.5


def lost(transitions, others=()):
    jobs = {t.job_id: job(t.job_id, dict(t.old.shares) if t.old else {}) for t in transitions}
    jobs |= {j.job_id: j for j in others}
    return set(hopeless(transitions, jobs, SIZES))


def test_a_ring_is_given_up_where_one_of_it_stays():
    """Found by benchmarks.transitions: the rest waited for each other for ever."""
    ring = [
        move(1, {"n1": 2}, {"n2": 2}),
        move(2, {"n2": 2}, {"n3": 2}),
        move(3, {"n3": 2}, {"n1": 2}),
    ]
    others = [job(8, {"n2": 2}), job(9, {"n3": 2}), job(10, {"n1": 2})]
    assert lost(ring, others) == set()
    assert chosen(ring, others) == {1, 2, 3}
    stays = job(3, {"n3": 2})  # undone: it did not save
    assert chosen(ring[:2], [*others, stays]) == set()
    assert lost(ring[:2], [*others, stays]) == {1, 2}


def test_the_others_of_a_ring_go_on():
    swap = [move(1, {"n1": 2}, {"n2": 2}), move(2, {"n2": 2}, {"n1": 2})]
    stranger = move(3, {"n3": 4}, {"n1": 2})
    others = [job(8, {"n1": 2}), job(9, {"n2": 2})]
    assert lost([*swap, stranger], others) == {3}
    assert chosen(swap, [*others, job(3, {"n3": 4})]) == {1, 2}


def test_who_waits_for_one_under_way_has_hope():
    giver = move(1, {"n1": 4}, {"n2": 4}, TransitionState.NOTIFY)
    assert lost([giver, move(2, {"n3": 4}, {"n1": 4})]) == set()
    assert lost([move(2, {"n3": 4}, {"n1": 4})], [job(1, {"n1": 4})]) == {2}


def test_what_is_under_way_is_never_given_up_here():
    both = [move(1, {"n1": 4}, {"n3": 3}, TransitionState.VERIFY), move(2, {"n2": 4}, {"n3": 3})]
    assert lost(both) == {2}


def half(job_id, index=0, *, node="n1"):
    held = Allocation.of("a100", {node: 1}, half=True)
    return dataclasses.replace(job(job_id, {node: 1}), allocation=held, parts=((node, index),))


def to_half(job_id, old):
    target = Allocation.of("a100", {"n1": 1}, half=True)
    return dataclasses.replace(move(job_id, old, {"n1": 1}), target=target, planned=target)


def test_half_of_a_gpu_is_free_where_another_job_has_the_other_half():
    start = to_half(1, None)
    others = [half(2), job(3, {"n1": 3})]
    assert chosen([start], others) == {1}
    assert chosen([start], [half(2), half(4), job(3, {"n1": 3})]) == set()
    assert chosen([start], [job(3, {"n1": 4})]) == set()


def test_a_job_divides_its_own_gpu_and_leaves_half_of_one_for_a_free_one():
    assert chosen([to_half(1, {"n1": 1})], [job(3, {"n1": 3})]) == {1}
    leaves = move(1, None, {"n1": 1})
    jobs = {1: half(1), 2: half(2), 3: job(3, {"n1": 3})}
    assert admitted([leaves], jobs, SIZES) == frozenset()
    jobs[3] = job(3, {"n1": 2})
    assert admitted([leaves], jobs, SIZES) == {1}
    # Alone on its GPU, it gets the whole one.
    del jobs[2]
    jobs[3] = job(3, {"n1": 3})
    assert admitted([leaves], jobs, SIZES) == {1}
    assert hopeless([leaves], jobs, SIZES) == frozenset()
