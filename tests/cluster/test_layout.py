"""Files that the `cluster` command generates, without Docker."""

import pytest
from clusterlib.compose import compose_file
from clusterlib.context import build_context
from clusterlib.image import STEP
from clusterlib.layout import Layout
from clusterlib.slurm_build import SlurmBuild
from clusterlib.slurmconf import slurm_conf, topology_conf


def test_six_nodes_in_two_racks_of_both_types() -> None:
    nodes = [(node.name, node.gpu_type, node.rack) for node in Layout().node_list()]
    assert nodes == [
        ("g01", "a100", 1),
        ("g02", "a100", 1),
        ("g03", "v100", 1),
        ("g04", "a100", 2),
        ("g05", "v100", 2),
        ("g06", "v100", 2),
    ]


@pytest.mark.parametrize("count", [2, 4, 8, 9, 10, 64, 256])
def test_a_rack_of_two_or_more_holds_both_types(count: int) -> None:
    racks: dict[int, list[str]] = {}
    for node in Layout(nodes=count, farm=True).node_list():
        racks.setdefault(node.rack, []).append(node.gpu_type)
    assert all(len(set(types)) == 2 for types in racks.values() if len(types) > 1)


def test_a_layout_survives_the_way_into_the_container() -> None:
    layout = Layout(nodes=64, gpus_per_node=8, farm=True, extra_conf="A=1\nB=2")
    assert Layout.from_environment(layout.environment()) == layout


def test_nodes_of_a_farm_differ_by_port() -> None:
    nodes = Layout(nodes=256, farm=True).node_list()
    assert {node.address for node in nodes} == {"10.89.0.3"}
    assert len({node.port for node in nodes}) == 256
    assert nodes[0].name == "g001"


def test_every_container_has_the_address_that_slurm_knows() -> None:
    layout = Layout(nodes=3)
    services = compose_file("x", layout)["services"]
    text = slurm_conf(layout)
    for node in layout.node_list():
        assert services[node.name]["networks"]["default"]["ipv4_address"] == node.address
        assert f"NodeName={node.name} NodeAddr={node.address} " in text
    assert f"SlurmctldHost=ctld({services['ctld']['networks']['default']['ipv4_address']})" in text


def test_topology_names_each_node_once() -> None:
    text = topology_conf(Layout(nodes=10))
    assert text.splitlines()[1:] == [
        "SwitchName=rack2 Nodes=g09,g10",
        "SwitchName=spine Switches=rack[1-2]",
    ]


def test_equal_trees_give_equal_contexts() -> None:
    assert build_context(SlurmBuild()) == build_context(SlurmBuild())


@pytest.mark.parametrize("line", ["Step 2/15 : RUN x", "#6 [ 2/15] RUN x", "#6 [base  2/15] RUN x"])
def test_both_builders_steps_are_understood(line: str) -> None:
    step = STEP.match(line)
    assert step
    assert (step[1] or step[2], step[3]) == ("2/15", "RUN x")
