"""What is known of jobs that ran beside each other, for tests of placement."""

from slurm_elastic.models.colocation.node_sharing import application_of, node_type
from slurm_elastic.models.colocation.shared_speeds import PartOfNode, SharedSpeeds


def speeds_of(cluster, pairs, *, times=5):
    """Return measurements after job a ran at this speed beside job b: {(a, b, GPUs each): s}."""
    speeds, snapshot = SharedSpeeds(), cluster.snapshot()
    kind = node_type(snapshot.nodes[0])
    for (job, other, gpus), speed in pairs.items():
        part, beside = (
            PartOfNode(application=application_of(snapshot.job[i]), gpus=gpus, node_cpus=32)
            for i in (job, other)
        )
        speeds.record_alone(part.application, "s", 1.0)
        for _ in range(times):
            speeds.record_shared(part, [beside], node_type=kind, setting="s", step_s=1 / speed)
    return speeds
