"""Switches and link domains from Slurm's commands and files."""

import doctest
import textwrap
from types import SimpleNamespace

import pytest

from slurm_elastic.slurm import gres, switches
from slurm_elastic.slurm.gres import parse_link_domains, read_link_domains
from slurm_elastic.slurm.readers import pyslurm_records
from slurm_elastic.slurm.switches import combined, parse_topology, read_switches
from slurm_elastic.topology import Tier, Topology, problems

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=leaf3 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=row1 Level=1 LinkSpeed=4 Nodes=n[1-4] Switches=leaf[1-2]
SwitchName=row2 Level=1 LinkSpeed=4 Nodes=n[5-6] Switches=leaf3
SwitchName=core Level=2 LinkSpeed=8 Nodes=n[1-6] Switches=row[1-2]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=n[3-4] BlockSize=2
BlockName=b3 BlockIndex=2 Nodes=n[5-6] BlockSize=2
AggregatedBlock=b[1-3] BlockIndex=4 Nodes=n[1-6] BlockSize=8
AggregatedBlock=b[1-2] BlockIndex=3 Nodes=n[1-4] BlockSize=4
AggregatedBlock=b3 BlockIndex=5 Nodes=n[5-6] BlockSize=4
"""
NODES = tuple(f"n{i}" for i in range(1, 7))


def test_examples_in_the_docs():
    assert doctest.testmod(gres).failed == 0


@pytest.mark.parametrize("text", [TREE, BLOCKS])
def test_trees_and_blocks_of_several_levels(text):
    parsed = parse_topology(text)
    tree = Topology(parsed, NODES)
    assert problems(parsed) == ()
    assert tree.tier(("n1", "n2")) is Tier.RACK
    assert tree.tier(("n1", "n3")) is Tier.SPINE
    assert (tree.distance("n1", "n2"), tree.distance("n1", "n3")) == (2, 4)
    assert tree.distance("n1", "n5") > 4
    assert len(tree.racks) == 3


def test_a_speed_that_is_not_given_is_one():
    (switch,) = parse_topology("SwitchName=leaf1 Level=0 LinkSpeed=0 Nodes=n[1-2]\n")
    assert switch.link_speed == 1


def test_blocks_above_blocks_know_which_they_hold():
    above = {s.name: (s.level, s.children) for s in parse_topology(BLOCKS) if s.children}
    assert above == {"b[1-2]": (1, ("b1", "b2")), "b[1-3]": (2, ("b3", "b[1-2]"))}


@pytest.mark.parametrize("text", ["", "No topology information available\n"])
def test_a_flat_network_has_no_switches(text):
    assert parse_topology(text) == ()


def named(**topologies):
    return {name: (f"of-{name}", text) for name, text in topologies.items()}


POD = """\
BlockName=leaf1 BlockIndex=0 Nodes=n[3-4] BlockSize=1
BlockName=b2 BlockIndex=1 Nodes=n5 BlockSize=1
AggregatedBlock=leaf1,b2 BlockIndex=2 Nodes=n[3-5] BlockSize=2
"""
RING = "RingName=r1 Nodes=n[1-6] RingSize=6\n"
UNSUPPORTED = "RingName is not supported, jobs are kept together by node only"


def test_a_node_stands_in_the_topology_of_its_partition():
    switches, unused = combined(TREE, named(same=TREE, pod=POD, flat=""))
    assert not unused
    assert problems(switches) == ()
    tree = Topology(switches, NODES)
    assert [tree.rack_of(n) for n in NODES] == ["leaf1", "leaf1", *["pod/leaf1"] * 2, "b2", "leaf3"]
    by_name = {s.name: (s.nodes, s.children) for s in switches}
    assert by_name["leaf1,b2"] == (("n3", "n4", "n5"), ("pod/leaf1", "b2"))
    assert by_name["row1"] == (("n1", "n2"), ("leaf1",))  # leaf2 is empty
    assert by_name["core"] == (("n1", "n2", "n6"), ("row1", "row2"))


def test_topologies_that_are_not_used_are_named():
    switches, unused = combined(TREE, named(pod=POD, blocks=BLOCKS, ring=RING))
    assert [s.name for s in switches if not s.children] == ["leaf1", "leaf3", "pod/leaf1", "b2"]
    assert unused == {
        "blocks of partition of-blocks": "n3 is in the topology of another partition",
        "ring of partition of-ring": UNSUPPORTED,
    }
    assert combined(RING, {}) == ((), {"of the cluster": UNSUPPORTED})


def test_partitions_are_asked_for_their_topologies(tmp_path, monkeypatch):
    script = f"""\
        #!/bin/sh
        case "$*" in
        "-o show partition") cat {tmp_path}/partitions;;
        "-o show topology") cat {tmp_path}/tree;;
        "-o show topology pod") cat {tmp_path}/pod;;
        *) exit 1;;
        esac
        """
    (tmp_path / "scontrol").write_text(textwrap.dedent(script))
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "tree").write_text(TREE)
    (tmp_path / "pod").write_text(POD)
    partitions = "PartitionName=a Nodes=n[1-6] State=UP MaxNodes=2\n"
    for name in ("b", "c"):
        partitions += f"PartitionName={name} Nodes=n[3-5] State=UP Topology=pod MaxNodes=2\n"
    (tmp_path / "partitions").write_text(partitions)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_switches() == combined(TREE, named(pod=POD)).switches


def test_without_scontrol_the_network_is_flat(monkeypatch):
    monkeypatch.setattr(switches.subprocess, "run", _missing)
    assert read_switches() == ()


def _missing(*_, **__):
    raise FileNotFoundError


PAIRS = """\
# two pairs on each
AutoDetect=off
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia0 Links=-1,0,16,0
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia1 Links=0,-1,0,16
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia2 \\
   Links=16,0,-1,0 Cores=0-7
NodeName=n[1-2] Name=gpu Type=a100 File=/dev/nvidia3 Links=0,16,0,-1
NodeName=n3 Name=gpu Type=v100 File=/dev/nvidia[0-3]
NodeName=n[1-3] Name=nic File=/dev/mlx0 Links=-1
NodeName=n[1-x] Name=gpu File=/dev/nvidia9 Links=many
"""


def test_links_of_gres_conf_make_domains():
    domains = parse_link_domains(PAIRS)
    assert domains.of("n1") == domains.of("n2") == ((0, 2), (1, 3))
    assert domains.of("n3") == domains.of("n4") == ()


def test_a_line_without_nodes_is_about_all():
    text = "Name=gpu File=/dev/nvidia0 Links=-1,2\nName=gpu File=/dev/nvidia1 Links=2,-1\n"
    assert parse_link_domains(text).of("anywhere") == ((0, 1),)


def test_gres_conf_lies_beside_slurm_conf(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert read_link_domains().of("n1") == ()
    (tmp_path / "gres.conf").write_text(PAIRS)
    assert read_link_domains().of("n1") == ((0, 2), (1, 3))


def test_domains_of_a_node_are_those_of_all_its_gpus_or_unknown():
    raw = SimpleNamespace(
        name="n1", configured_gres={"gpu:a100": 4}, allocated_gres={}, state="IDLE",
        effective_cpus=8, total_cpus=8, real_memory=1, allocated_cpus=0, allocated_memory=0,
        partitions=(), active_features=(), available_features=(),
    )  # fmt: skip
    pairs = ((0, 2), (1, 3))
    assert pyslurm_records.node(raw, 0, barred=False, domains=pairs).domains == pairs
    assert pyslurm_records.node(raw, 0, barred=False, domains=((0, 1),)).domains == ()


def test_which_gpus_a_job_holds():
    layout = {
        "n1": {"gres": {"gpu:a100": {"count": 3, "indexes": "0-2"}, "nic": {"indexes": "0"}}},
        "n2": {"gres": {"gpu:a100": {"count": 1, "indexes": "N/A"}}},
        "n3": {"gres": None},
    }
    assert pyslurm_records.devices(layout) == (("n1", "0-2"),)
