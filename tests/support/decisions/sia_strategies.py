"""Random configurations, clusters and questions for tests of the policies sia and icefrog."""

from hypothesis import strategies as st

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config, ControllerSettings, ResizeSettings
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.plan import Measurement
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.policy_protocol import Question
from tests.support.decisions.synthetic_clusters import Cluster, node

TYPES = ("a100", "t4", "v100")


def random_config(rng):
    return Config(
        controller=ControllerSettings(
            queue=rng.choice(["slurm", "controller"]), policy="sia", mode="act"
        ),
        resize=ResizeSettings(min_interval_s=0.0, per_hour=1000),
        sia=SiaSettings(
            artifact_compat=rng.random() < 0.3,
            p=rng.choice([-0.5, -1.0, 0.5]),
            growth=rng.choice([1.0, 2.0, 100.0]),
        ),
    )


def random_cluster(rng, nodes, jobs):
    """Return nodes of mixed sizes and jobs of every class, some in odd shapes, some unmeasured."""
    sizes = [rng.choice([1, 2, 4, 6, 8]) for _ in range(nodes)]
    kinds = [rng.choice(TYPES) for _ in range(nodes)]
    members = [
        node(f"n{i}", size, kind, available=rng.random() < 0.95)
        for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
    ]
    cluster = Cluster(members)
    free = {n.name: n.gpus for n in members}
    for job_id in range(1, jobs + 1):
        _add_job(rng, cluster, free, job_id)
    return cluster


def _add_job(rng, cluster, free, job_id):
    kind = rng.choice([n.gpu_type for n in cluster.nodes])
    on = {}
    if rng.random() < 0.7:
        homes = [n.name for n in cluster.nodes if n.gpu_type == kind and free[n.name]]
        for name in rng.sample(homes, min(len(homes), rng.choice([1, 1, 2, 3]))):
            on[name] = rng.randint(1, free[name])
            free[name] -= on[name]
    held = sum(on.values())
    unit = rng.choice([u for u in (1, 1, 2, 3, 4) if held % u == 0])
    most = max(held, unit * rng.choice([1, 2, 4, 8]))
    rigid = rng.random() < 0.2
    least = most if rigid else unit * rng.randint(1, most // unit)
    least = min(least, held) if held and not rigid else least
    most = held if rigid and held else most
    least = most if rigid else least
    directive = f"{least}-{most}" + (f",unit={unit}" if unit > 1 else "")
    record = {"resizes": rng.randint(0, 9), "restart_s": rng.choice([None, 1.0, 250.0])}
    if rng.random() < 0.7:
        record["learned"] = _learned(rng, kind, on, most, rigid, unit)
    elif on and rng.random() < 0.5:
        measurement = Measurement(
            gpu_type=kind, gpus=held, nodes=len(on), samples_per_s=rng.uniform(1, 100), steps=9
        )
        record["measurements"] = (measurement,)
    cluster.add(job_id, elastic=directive, on=on or None, record=record)


def _learned(rng, kind, on, gpus, rigid, unit):
    types = tuple(
        TypeProfile(
            t,
            least=rng.choice([1, 4]),
            most=rng.choice([16, 64]),
            single=rng.choice([None, rng.uniform(1, 1000)]),
            rate=rng.choice([None, rng.uniform(1, 1000)]),
            unit=unit,
        )
        for t in TYPES
    )
    job_class = (
        JobClass.RIGID if rigid else rng.choice([JobClass.ADAPTIVE, JobClass.STRONG_SCALING])
    )
    batch = rng.choice([16, 64, 256])
    application = Application(
        name=f"app{rng.randint(0, 2)}",
        job_class=job_class,
        initial_batch=16,
        max_batch=max(batch, rng.choice([16, 512])),
        batch=batch,
        gpus=gpus,
        types=types,
    )
    observations = ()
    held = sum(on.values())
    if on and rng.random() < 0.7:
        micro_step = rng.uniform(0.01, 2.0)
        step = micro_step * rng.uniform(1.0, 2.0)
        observations = (Observation(kind, len(on), held, 8, step, micro_step),)
    noise = Noise(rng.uniform(0.0, 10.0), rng.uniform(0.1, 1e4)) if rng.random() < 0.8 else None
    return Learned(application, observations, noise)


def random_question(cluster, seed, leave_out=None):
    snapshot = cluster.snapshot()
    jobs = tuple(j for j in cluster.records if j != leave_out)
    capacity = dict.fromkeys(TYPES, 0)
    for n in snapshot.nodes:
        capacity[n.gpu_type] += n.free_gpus
    for j in jobs:
        held = snapshot.job[j].allocation
        if held is not None:
            capacity[held.gpu_type] += held.gpus
    stated = Config().speedup
    models = {j: SpeedModel.fit(stated, cluster.records[j].measurements) for j in jobs}
    return Question(
        snapshot=snapshot,
        records=cluster.records,
        models=models,
        jobs=jobs,
        capacity=capacity,
        seed=seed,
    )


#: Counts of nodes and jobs, and a seed.
CASES = (st.integers(1, 8), st.integers(0, 12), st.integers(0, 2**32))
