import pytest

from slurm_elastic.core.cluster import Allocation, Snapshot, Switch
from slurm_elastic.topology import Tier, Topology, TopologyError, check, problems

LEAVES = (Switch("r1", 0, ("g1", "g2")), Switch("r2", 0, ("g3",)))
SPINE = Switch("spine", 1, ("g1", "g2", "g3"), ("r1", "r2"))


def tree(switches=(*LEAVES, SPINE), nodes=("g1", "g2", "g3")):
    return Topology(switches, nodes)


def test_the_tier_of_an_allocation_is_the_farthest_link_it_uses():
    assert tree().tier(Allocation.of("a100", {"g1": 4})) is Tier.NODE
    assert tree().tier(("g1", "g2")) is Tier.RACK
    assert tree().tier(("g2", "g3")) is Tier.SPINE
    assert Tier.DOMAIN < Tier.NODE < Tier.RACK < Tier.SPINE
    assert tree().tier(("g1",), linked=True) is Tier.DOMAIN
    assert tree().tier(("g1", "g2"), linked=True) is Tier.RACK


def test_racks_are_named_by_their_switch():
    assert tree().rack_of("g3") == "r2"
    assert tree().racks_of(("g3", "g1")) == ("r1", "r2")
    assert tree().spread(("g1", "g3")) == (2, 2)


def test_without_switches_all_nodes_are_one_rack():
    flat = tree(switches=())
    assert flat.tier(("g1", "g3")) is Tier.RACK
    assert flat.rack_of("g1") == ""


def test_a_node_that_no_switch_names_is_a_rack_of_its_own():
    lonely = tree(nodes=("g1", "g2", "g3", "x"))
    assert lonely.tier(("g1", "x")) is Tier.SPINE


def test_a_switch_may_be_called_like_a_node():
    twin = Topology((Switch("g1", 0, ("g1", "g2")),), ("g1", "g2"))
    assert twin.tier(("g1", "g2")) is Tier.RACK


def test_the_order_of_switches_does_not_matter():
    other = tree(switches=(SPINE, *reversed(LEAVES)))
    assert other.racks == tree().racks
    assert set(other.graph.edges) == set(tree().graph.edges)


def test_the_tree_is_kept_between_rounds():
    first = Snapshot(time=0.0, nodes=(), jobs=(), switches=LEAVES)
    second = Snapshot(time=1.0, nodes=(), jobs=(), switches=LEAVES)
    assert Topology.of(first) is Topology.of(second)


def test_distance_counts_links():
    assert tree().distance("g1", "g1") == 0
    assert tree().distance("g1", "g2") == 2
    assert tree().distance("g1", "g3") == 4
    assert tree(switches=()).distance("g1", "g3") == 2
    assert tree(switches=LEAVES).distance("g1", "g3") == 4, "no switch connects them"
    lonely = tree(nodes=("g1", "g2", "g3", "x"))
    assert lonely.distance("x", "g1") > 2


def test_links_are_those_that_communication_crosses():
    assert tree().links(("g1",)) == ()
    assert tree().links(("g2", "g1")) == ("g1", "g2")
    assert tree().links(Allocation.of("a100", {"g2": 1, "g3": 1})) == (
        "g2",
        "g3",
        "switch:r1",
        "switch:r2",
    )


def test_who_crosses_which_link():
    wheres = {3: ("g1", "g3"), 1: ("g2", "g3"), 2: ("g1", "g2")}
    assert tree().users(wheres) == {
        "g1": (2, 3),
        "g2": (1, 2),
        "g3": (1, 3),
        "switch:r1": (1, 3),
        "switch:r2": (1, 3),
    }
    fast = Topology((Switch("r1", 0, ("g1",), link_speed=40),), ("g1",))
    assert (fast.link_speed("switch:r1"), fast.link_speed("g1")) == (40, 1)


def test_a_tree_that_is_none_is_refused_in_one_line():
    assert problems((*LEAVES, SPINE)) == ()
    loop = (Switch("a", 1, (), ("b",)), Switch("b", 1, (), ("a",)))
    assert problems(loop) == ("switches a > b > a form a loop; remove one from Switches=",)
    twice = (Switch("r1", 0, ("g1",)), Switch("r2", 0, ("g1",)))
    assert problems(twice) == ("node g1 is in two racks, r1 and r2; name it in one of them",)
    stray = (Switch("top", 1, ("g1",), ("r9",)),)
    with pytest.raises(TopologyError, match="switch top names r9, which does not exist"):
        check(stray)
    two = (*LEAVES, SPINE, Switch("other", 1, (), ("r1",)))
    assert problems(two) == ("switch r1 is below other and spine; name it in one of them",)


def test_a_thousand_nodes_are_looked_at_quickly():
    names = tuple(f"n{i:04}" for i in range(1000))
    racks = tuple(Switch(f"r{i}", 0, names[25 * i : 25 * i + 25]) for i in range(40))
    top = Switch("top", 1, names, tuple(r.name for r in racks))
    large = Topology((*racks, top), names)
    jobs = {i: names[i::100] for i in range(100)}
    assert len(large.users(jobs)["switch:r0"]) == 25
    assert large.distance(names[0], names[999]) == 4
