"""The container cluster has the nodes, users and services that other cluster tests expect."""

import json

import pytest

from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

NODES = {"g01": "a100", "g02": "a100", "g03": "v100", "g04": "a100", "g05": "v100", "g06": "v100"}


def test_nodes_have_their_gpus_and_answer(cluster: SlurmCluster) -> None:
    lines = cluster.exec("sinfo -h -N -o '%N %G'").stdout.splitlines()
    assert dict(map(str.split, lines)) == {name: f"gpu:{gpu}:4" for name, gpu in NODES.items()}

    def states() -> set[str]:
        return set(cluster.exec("sinfo -h -N -o '%T'").stdout.split())

    # For a moment they are unknown to a slurmctld that another test has started again.
    until(lambda: states() <= {"idle", "mixed", "allocated"}, what=lambda: str(states()))


def test_topology_has_two_racks_below_a_spine(cluster: SlurmCluster) -> None:
    text = cluster.exec("scontrol -o show topology").stdout
    switches = {line.split()[0]: line for line in text.splitlines()}
    assert set(switches) == {"SwitchName=rack1", "SwitchName=rack2", "SwitchName=spine"}
    for number, nodes in ((1, ["g01", "g02", "g03"]), (2, ["g04", "g05", "g06"])):
        names = switches[f"SwitchName=rack{number}"].rpartition("Nodes=")[2]  # folded or not
        assert cluster.exec(["scontrol", "show", "hostnames", names]).stdout.split() == nodes


def test_users_have_accounts_and_the_operator_its_level(cluster: SlurmCluster) -> None:
    text = cluster.exec("sacctmgr -nP show assoc format=account,user").stdout
    assert {"research|alice", "teaching|bob", "operators|selastic"} <= set(text.splitlines())
    text = cluster.exec("sacctmgr -nP show user selastic format=adminlevel").stdout
    assert text.strip() == "Operator"


def test_a_step_sees_its_gpus_only(cluster: SlurmCluster) -> None:
    done = cluster.exec(
        "srun -l -N2 --ntasks-per-node=1 --gres=gpu:v100:2"
        " sh -c 'echo $USER $CUDA_VISIBLE_DEVICES'",
        user="alice",
    )
    assert sorted(done.stdout.splitlines()) == ["0: alice 0,1", "1: alice 0,1"]


def test_accounting_counts_gpus(cluster: SlurmCluster) -> None:
    job = cluster.sbatch("true", "--gres=gpu:a100:3")
    cluster.wait(job, "COMPLETED")
    sacct = f"sacct -nXP -j {job} -o alloctres"
    until(lambda: cluster.exec(sacct).stdout.strip() != "")  # slurmdbd hears of it a moment later
    assert {"gres/gpu=3", "gres/gpu:a100=3"} <= set(cluster.exec(sacct).stdout.strip().split(","))


def test_a_qos_limit_holds(cluster: SlurmCluster) -> None:
    first = cluster.sbatch("sleep 60", "--qos=small", "--gres=gpu:4")
    cluster.wait(first, "RUNNING")
    second = cluster.sbatch("sleep 60", "--qos=small", "--gres=gpu:1")
    reason = f"squeue -h -j {second} -o %r"
    until(lambda: cluster.exec(reason).stdout.strip() == "QOSMaxGRESPerUser")


def test_pyslurm_reads_the_nodes(cluster: SlurmCluster) -> None:
    if cluster.exec("test -d /opt/slurm", check=False).returncode == 0:
        pytest.skip("pyslurm is installed for Debian's Slurm only")
    script = (
        "import json, pyslurm; "
        "print(json.dumps({n.name: n.configured_gres for n in pyslurm.Nodes.load().values()}))"
    )
    done = cluster.exec(["python", "-c", script], user="selastic")
    assert json.loads(done.stdout) == {name: {f"gpu:{gpu}": 4} for name, gpu in NODES.items()}


def test_the_shared_volume_is_shared(cluster: SlurmCluster) -> None:
    cluster.exec("echo hello >/shared/scratch/smoke", user="alice", node="g01")
    assert cluster.exec("cat /shared/scratch/smoke", user="bob", node="g06").stdout == "hello\n"
    cluster.exec("rm /shared/scratch/smoke", user="alice")
