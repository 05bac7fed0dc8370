"""Short runs on one idle GPU of a type of which nothing is known."""

import dataclasses

import pytest

from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import Application, Learned, Noise, Observation, TypeProfile
from slurm_elastic.policies.goodput.marginal_value import MarginalValue
from slurm_elastic.round import decide_round
from tests.support.decisions.reasons import words
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

NET = Application(
    name="net",
    initial_batch=64,
    max_batch=64,
    batch=64,
    types=tuple(
        TypeProfile(name, least=1, most=256, single=100.0, estimated=name != "a100")
        for name in ("a100", "h100", "t4")
    ),
)
#: Synchronisation is dear: more GPUs are worth nothing, which keeps the job at one.
SEEN = tuple(Observation("a100", 1, g, 64 // g, 9.0 if g > 1 else 0.5, 0.5 / g) for g in (1, 2))
SLOW = (Observation("t4", 1, 1, 64, 2.0, 2.0), Observation("h100", 1, 1, 64, 0.9, 0.9))


def settings(queue="slurm", profiles=1, **others):
    return Config(
        controller=ControllerSettings(queue=queue, mode="act", policy="goodput"),
        resize=ResizeSettings(restart_s=30.0, min_interval_s=0.0, per_hour=999),
        goodput=GoodputSettings(profiles=profiles, wait_s=0.0, **others),
    )


def cluster(*jobs, types=("a100", "t4")):
    """Return a cluster with a node of each type, and one user's jobs 1, 3, 5, ...

    Args:
        jobs: (on, directive, more of its record) of each.
        types: of the nodes.
    """
    made = Cluster([node(f"n-{kind}", gpu_type=kind) for kind in types])
    for job_id, (on, elastic, more) in zip(range(1, 99, 2), jobs, strict=False):
        fields = {"learned": Learned(NET, SEEN, Noise(1.0, 1.0)), "proven": True}
        record = fields | {"reporting": on is not None, "restart_s": 30.0} | more
        made.add(job_id, elastic=elastic, on=on, gpus=1, record=record)
    return made


def decide(made, config, state=None, at=NOW):
    snapshot = dataclasses.replace(made.snapshot(), time=at)
    return decide_round(
        snapshot, made.records, config=config, policy=MarginalValue(config), state=state or {}
    )


def shapes(plan):
    return {d.job_id: d.target and (d.target.gpu_type, d.target.gpus) for d in plan.decisions}


ON_A100 = {"n-a100": 1}


@pytest.mark.parametrize("queue", ["slurm", "controller"])
def test_a_small_job_measures_an_idle_type_once(queue):
    made = cluster((ON_A100, "1-8", {}))
    plan, state = decide(made, settings(queue))
    assert shapes(plan) == {1: ("t4", 1)}
    assert "measures its speed on one idle t4" in words(plan.decision[1].reason)
    there = cluster(({"n-t4": 1}, "1-8", {}))
    plan, state = decide(there, settings(queue), state, at=NOW + 60)
    assert shapes(plan) == {1: ("t4", 1)}, "it stays until it has reported"
    known = Learned(NET, (*SEEN, SLOW[0]), Noise(1.0, 1.0))
    there = cluster(({"n-t4": 1}, "1-8", {"learned": known}))
    plan, state = decide(there, settings(queue), state, at=NOW + 120)
    assert shapes(plan) == {1: ("a100", 1)}, "four times as fast"
    plan, _ = decide(cluster((ON_A100, "1-8", {"learned": known})), settings(queue), state)
    assert shapes(plan) == {1: ("a100", 1)}


def test_it_ends_after_its_longest_time_and_is_not_repeated():
    config = settings(profile_s=100.0, profiles=1)
    _, state = decide(cluster((ON_A100, "1-8", {})), config)
    there = cluster(({"n-t4": 1}, "1-8", {}))
    _, state = decide(there, config, state, at=NOW + 60)
    _, state = decide(there, config, state, at=NOW + 161)
    assert state["policy"]["profiles"] == {"1@0": {"tried": ["t4"]}}
    plan, _ = decide(cluster((ON_A100, "1-8", {})), config, state, at=NOW + 300)
    assert shapes(plan) == {1: ("a100", 1)}


def test_each_job_measures_few_types():
    types = ("a100", "h100", "t4")
    state, config = {}, settings(profiles=1)
    plan, state = decide(cluster((ON_A100, "1-8", {}), types=types), config, state)
    assert shapes(plan) == {1: ("h100", 1)}
    known = Learned(NET, (*SEEN, SLOW[1]), Noise(1.0, 1.0))
    back = cluster((ON_A100, "1-8", {"learned": known}), types=types)
    plan, _ = decide(back, config, state, at=NOW + 600)
    assert shapes(plan) == {1: ("a100", 1)}
    plan, _ = decide(back, settings(profiles=2), state, at=NOW + 600)
    assert shapes(plan) == {1: ("t4", 1)}


def test_one_job_of_an_application_measures_a_type_at_a_time():
    made = cluster((ON_A100, "1-8", {}), (ON_A100, "1-8", {}))
    plan, _ = decide(made, settings())
    assert sorted(shapes(plan).values()) == [("a100", 1), ("t4", 1)]


@pytest.mark.parametrize(
    ("on", "elastic", "more"),
    [
        (ON_A100, "1-8,types=a100", {}),
        (ON_A100, "1-1", {}),
        ({"n-a100": 2}, "2-8", {}),
        ({"n-a100": 4}, "1-8", {}),
        (ON_A100, "1-8", {"held": True}),
        (ON_A100, "1-8", {"proven": False}),
        (ON_A100, "1-8", {"learned": Learned(NET)}),
        (ON_A100, "1-8", {"learned": None}),
    ],
)
def test_jobs_that_cannot_or_may_not_do_not(on, elastic, more):
    plan, _ = decide(cluster((on, elastic, more)), settings())
    assert all(shape is None or shape[0] == "a100" for shape in shapes(plan).values())


def test_a_job_may_start_on_the_type_that_it_measures():
    plan, _ = decide(cluster((None, "1-8", {})), settings("controller"))
    assert shapes(plan) == {1: ("t4", 1)}


def test_a_job_with_little_left_does_not():
    made = cluster((ON_A100, "1-8", {"progress": 0.4}))
    _, state = decide(made, settings(profiles=0))
    made = cluster((ON_A100, "1-8", {"progress": 0.9}))
    plan, _ = decide(made, settings(), state, at=NOW + 600)
    assert shapes(plan) == {1: ("a100", 1)}


def test_nobody_gives_up_a_gpu_for_it():
    known = {"learned": Learned(NET, (*SEEN, SLOW[0]), Noise(1.0, 1.0))}
    full = [({"n-t4": 1}, "1-1,types=t4", known) for _ in range(4)]
    plan, _ = decide(cluster((ON_A100, "1-8", {}), *full), settings("controller"))
    assert set(shapes(plan).values()) == {("a100", 1), ("t4", 1)}
    assert shapes(plan)[1] == ("a100", 1)


def test_it_is_off_by_default():
    plan, state = decide(
        cluster((ON_A100, "1-8", {})), settings(profiles=GoodputSettings().profiles)
    )
    assert shapes(plan) == {1: ("a100", 1)}
    assert "profiles" not in state["policy"]
