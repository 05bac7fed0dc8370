"""Link speeds and link domains: what is configured, what gres.conf tells, what is wrong."""

import doctest

import pytest

from slurm_elastic import fabric
from slurm_elastic.config import placement_settings
from slurm_elastic.core.cluster import Node, Snapshot, Switch
from slurm_elastic.fabric import Fabric

NODES = tuple(
    Node(name=f"g0{i}", gpu_type="a100" if i < 3 else "v100", gpus=4) for i in range(1, 5)
)
SWITCHES = (
    Switch("rack1", 0, ("g01", "g02")),
    Switch("b[3-4]", 0, ("g03", "g04")),
    Switch("top", 1, ("g01", "g02", "g03", "g04"), ("rack1", "b[3-4]")),
)


def resolved(nodes=NODES, **settings):
    snapshot = Snapshot(time=0, nodes=nodes, jobs=(), switches=SWITCHES)
    return Fabric.of(snapshot, placement_settings.TopologySettings(**settings))


def test_examples_in_the_docs():
    assert doctest.testmod(fabric).failed == 0


def test_nothing_is_known_and_nothing_is_wrong_where_nothing_is_configured():
    bare = resolved()
    assert (bare.gbit_s("g01"), bare.gbit_s("switch:rack1")) == (None, None)
    assert (bare.domains("g01"), bare.problems) == ((), ())


def test_a_single_link_counts_more_than_its_tier():
    found = resolved(
        speeds={"rack": 100.0, "spine": 400.0}, uplinks={"g[01-02]": 50.0, "b[3-4]": 200.0}
    )
    assert [found.gbit_s(n) for n in ("g01", "g02", "g03")] == [50, 50, 100]
    assert (found.gbit_s("switch:rack1"), found.gbit_s("switch:b[3-4]")) == (400, 200)
    assert found.problems == ()


def test_a_node_counts_more_than_its_type_and_the_file_more_than_gres_conf():
    nodes = (*NODES[:3], Node(name="g04", gpu_type="v100", gpus=4, domains=((0, 2), (1, 3))))
    found = resolved(nodes, domains={"g02": 4, "a100": 2})
    assert found.domains("g01") == ((0, 1), (2, 3))
    assert found.domains("g02") == ((0, 1, 2, 3),)
    assert found.domains("g03") == ()
    assert found.domains("g04") == ((0, 2), (1, 3))
    assert resolved(nodes, domains={"v100": 2}).domains("g04") == ((0, 1), (2, 3))
    assert found.in_one_domain("g04", (0, 2))
    assert not found.in_one_domain("g04", (0, 1))
    assert not found.in_one_domain("g04", ())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"uplinks": {"g[01-09]": 1.0}},
            "uplinks: g[05-09] are neither a node nor a switch; correct",
        ),
        ({"uplinks": {"leaf9": 1.0}}, "uplinks: leaf9 is neither a node nor a switch; correct or"),
        ({"uplinks": {"g[1-x]": 1.0}}, 'uplinks: "g[1-x]" is invalid: expected a list of no'),
        ({"domains": {"h100": 4}}, "domains: h100 is neither a node nor a GPU type; correct or"),
        ({"domains": {"": 4}}, 'domains: "" is invalid: expected a list of nodes, e.g. g[01-04]'),
        (
            {"domains": {"a100": 3}},
            "domains: g[01-02] has 4 GPUs, not divisible by 3; change the number",
        ),
    ],
)
def test_what_names_nothing_is_told_and_left_out(settings, line):
    found = resolved(**settings)
    (problem,) = found.problems
    assert problem.startswith(f"[topology] {line}")
    assert found.domains("g01") == ()
