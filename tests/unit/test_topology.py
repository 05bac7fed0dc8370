from slurm_elastic.cluster import Allocation, Snapshot, Switch
from slurm_elastic.topology import Tier, Topology

LEAVES = (Switch("r1", 0, ("g1", "g2")), Switch("r2", 0, ("g3",)))
SPINE = Switch("spine", 1, ("g1", "g2", "g3"), ("r1", "r2"))


def tree(switches=(*LEAVES, SPINE), nodes=("g1", "g2", "g3")):
    return Topology(switches, nodes)


def test_tiers():
    assert tree().tier(Allocation.of("a100", {"g1": 4})) is Tier.NODE
    assert tree().tier(("g1", "g2")) is Tier.RACK
    assert tree().tier(("g2", "g3")) is Tier.SPINE
    assert Tier.NODE < Tier.RACK < Tier.SPINE


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
