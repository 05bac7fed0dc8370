"""Policy `icefrog`: frozen jobs keep the GPUs that still gain; other jobs get the rest."""

import dataclasses

import pytest

from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import (
    Application,
    JobClass,
    LayerCost,
    Learned,
    Noise,
    Observation,
    Prefixes,
    TypeProfile,
)
from slurm_elastic.core.plan import Action
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.icefrog.icefrog import IceFrog
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.sia import Sia
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import Cluster, node

CONFIG = Config(
    controller=ControllerSettings(queue="controller", mode="act", policy="icefrog"),
    resize=ResizeSettings(restart_s=1.0, min_interval_s=0.0, per_hour=999),
)
NET = Application(
    name="net",
    job_class=JobClass.STRONG_SCALING,
    initial_batch=192,
    max_batch=192,
    batch=192,
    types=(TypeProfile("a100", least=1, most=192, single=100.0),),
)
#: Slow across nodes, as of a job that sends much; and fast, as of one that computes.
TALKS = ((1, 1, 0.0), (1, 2, 0.03), (1, 4, 0.03), (2, 8, 0.1), (3, 12, 0.1))
WORKS = ((1, 1, 0.0), (1, 2, 0.005), (1, 4, 0.005), (2, 8, 0.005), (3, 12, 0.005))
#: Front layers compute, rear layers are sent.
LAYERS = tuple(LayerCost(1.0, 2.0, 1.0 + 200.0 * (i > 21)) for i in range(24))
FROZEN = Prefixes(
    layers=24,
    certified=22,
    frozen=22,
    penalties=((22, 0.004),),
    max_penalty=0.005,
    costs=LAYERS,
)


def learned(times, prefixes=None):
    seen = tuple(
        Observation("a100", n, g, 192 // g, 1.92 / g + sync, 1.92 / g) for n, g, sync in times
    )
    return Learned(NET, seen, Noise(1.0, 20000.0), prefixes)


def cluster(one, other=None, *, times=(TALKS, WORKS), nodes=((1, 2), (3, 4))):
    """Cluster with two jobs in whole nodes of four GPUs."""
    found = Cluster([node(f"n{i}", 4) for i in range(1, 5)])
    for job_id, prefixes in ((1, one), (2, other)):
        on = {f"n{i}": 4 for i in nodes[job_id - 1]}
        record = {
            "learned": learned(times[job_id - 1], prefixes),
            "proven": True,
            "reporting": True,
        }
        found.add(job_id, elastic="1-12", on=on, record=record)
    return found


def question(found):
    return Question(
        snapshot=found.snapshot(),
        records=found.records,
        models={j: SpeedModel.fit(CONFIG.speedup, ()) for j in found.records},
        jobs=tuple(found.records),
        capacity={"a100": 16},
    )


def best(policy, found):
    proposals, _ = policy.decide(question(found), {})
    return {p.job_id: p.alternatives[0] for p in proposals}


def test_gpus_go_from_a_frozen_job_to_one_that_gains_more_with_the_reason_in_words():
    found = cluster(FROZEN, None)
    told = best(IceFrog(CONFIG), found)
    assert (told[1].gpus, told[2].gpus) == (4, 12)
    assert words(told[1].reason).startswith("layers 1-22 of 24 frozen: 8 GPUs would gain it ")
    assert "; 4 go to job 2; " in words(told[1].reason)
    assert "frozen" not in words(told[2].reason)
    # Sia does not model freezing, and changes nothing.
    assert [a.gpus for a in best(Sia(CONFIG), found).values()] == [8, 8]


def test_both_frozen_alike_keep_what_they_have():
    found = cluster(FROZEN, FROZEN, times=(WORKS, WORKS))
    assert [a.gpus for a in best(IceFrog(CONFIG), found).values()] == [8, 8]


@pytest.mark.parametrize(
    "prefixes",
    [
        dataclasses.replace(FROZEN, max_penalty=0.003),
        dataclasses.replace(FROZEN, certified=0, frozen=0),
        dataclasses.replace(FROZEN, penalties=()),
        None,
    ],
    ids=["too dear", "not certified", "penalty unknown", "not asked for"],
)
def test_what_may_not_be_frozen_counts_as_for_sia(prefixes):
    found = cluster(prefixes, None)
    assert best(IceFrog(CONFIG), found) == best(Sia(CONFIG), found)


def test_a_whole_round_carries_it_out_and_the_next_one_rests():
    found, policy = cluster(FROZEN, None), IceFrog(CONFIG)
    plan, state = decide_round(
        found.snapshot(), found.records, config=CONFIG, policy=policy, state={}
    )
    assert plan.decision[1].action is Action.SHRINK
    assert "layers 1-22 of 24 frozen" in words(plan.decision[1].reason)
    again = cluster(FROZEN, nodes=((1,), (2, 3, 4)))
    told = best(policy, again)
    assert (told[1].gpus, told[2].gpus) == (4, 12)
    assert words(told[1].reason).startswith("layers 1-22 of 24 frozen; ")
    proposals, after = policy.decide(question(again), state)
    assert after == state
    assert proposals == IceFrog(CONFIG).decide(question(again), state)[0]
