import pytest

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.core.execution.possible_plans import misfit, own_plan, possible_plans
from slurm_elastic.core.execution.supported_options import SupportedOptions

ABLE = SupportedOptions(stages=4, tensor=True, shard=True)


def plans(text: str, able: SupportedOptions = ABLE, *, gpus: int, nodes: int = 1) -> list[str]:
    places = [gpus // nodes] * nodes
    return [str(p) for p in possible_plans(Directive.parse(text), able, places)]


def test_ranks_that_share_weights_are_on_one_node():
    directive = Directive.parse("1-8")
    assert [str(p) for p in possible_plans(directive, ABLE, (3, 1))] == ["4x1+shard=full"]
    assert "3x1+tensor=2" in map(str, possible_plans(directive, ABLE, (4, 2)))


@pytest.mark.parametrize(
    ("directive", "gpus", "nodes", "expected"),
    [
        ("1-8", 1, 1, []),
        ("1-8", 2, 1, ["2x1+shard=full", "1x1+tensor=2"]),
        ("1-8", 4, 2, ["4x1+shard=full", "2x1+tensor=2"]),
        ("1-8", 4, 4, ["4x1+shard=full"]),
        ("1-8", 3, 1, ["3x1+shard=full"]),
        ("2-8,parallel=pipeline", 2, 2, ["1x2"]),
        ("2-8,parallel=pipeline", 4, 1, ["1x4", "1x2+tensor=2", "1x1+tensor=4"]),
        ("2-8,parallel=hybrid,unit=2", 4, 1, ["2x2", "2x1+tensor=2"]),
    ],
)
def test_plans_of_an_allocation(directive, gpus, nodes, expected):
    assert plans(directive, gpus=gpus, nodes=nodes) == expected


def test_what_a_training_cannot_carry_out_is_left_out():
    assert plans("1-8,parallel=hybrid", SupportedOptions(), gpus=4) == ["4x1"]
    assert plans("1-8,parallel=hybrid", SupportedOptions(stages=2), gpus=4) == ["4x1", "2x2"]


@pytest.mark.parametrize(
    ("directive", "gpus", "nodes", "expected"),
    [
        ("1-8", 2, 1, ["2x1+shard=full", "1x1+tensor=2"]),
        (
            *("1-8", 4, 1),
            ["4x1+shard=full", "2x1+tensor=2", "2x1+tensor=2+shard=full", "1x1+tensor=4"],
        ),
        ("1-8", 4, 4, ["4x1+shard=full"]),
        ("4,parallel=pipeline", 4, 1, ["1x4", "1x2+tensor=2", "1x1+tensor=4"]),
    ],
)
def test_replicas_of_ranks_that_share_weights_divide_parameters(directive, gpus, nodes, expected):
    both = SupportedOptions(stages=4, tensor=True, shard=True, mesh=True)
    assert plans(directive, both, gpus=gpus, nodes=nodes) == expected


@pytest.mark.parametrize(
    ("options", "divisions"),
    [
        ({}, ["", "+shard=optimizer"]),
        ({"mesh": True}, ["", "+shard=optimizer", "+shard=full"]),
        ({"own_sharding": Sharding.OPTIMIZER, "own_tensor": 2}, [""]),
        ({"tensor": False}, []),
    ],
)
def test_replicas_of_ranks_that_share_weights_divide_the_optimizers_state(options, divisions):
    able = SupportedOptions(**{"tensor": True, "slices": True} | options)
    found = [p for p in plans("1-8", able, gpus=4) if "tensor=4" not in p]
    assert found == [f"2x1+tensor=2{division}" for division in divisions]


def test_a_script_that_recomputes_does_so_in_every_plan():
    able = SupportedOptions(stages=2, tensor=True, recompute=True)
    # A layout alone leaves the option to the script.
    assert plans("1-8,parallel=hybrid", able, gpus=2) == ["2x1", "1x2", "1x1+tensor=2+recompute"]


@pytest.mark.parametrize("kind", ["data", "hybrid", "pipeline"])
def test_each_plan_fits_the_directive_and_the_allocation(kind):
    directive = Directive.parse(f"1-64,parallel={kind}")
    for gpus in range(1, 33):
        for nodes in (n for n in range(1, gpus + 1) if gpus % n == 0):
            found = possible_plans(directive, ABLE, [gpus // nodes] * nodes)
            assert len(set(found)) == len(found)
            for plan in found:
                assert plan.world == gpus
                assert (gpus // nodes) % plan.tensor == 0
                assert not misfit(plan, directive)


@pytest.mark.parametrize(
    ("able", "expected"),
    [
        (SupportedOptions(stages=2), ["4x1", "2x2"]),
        (SupportedOptions(stages=2, sliced_stages=True), ["4x1", "2x2", "2x2+shard=optimizer"]),
        (
            SupportedOptions(stages=2, sliced_stages=True, recompute=True),
            ["4x1", "2x2", "2x2+shard=optimizer+recompute"],
        ),
        (
            SupportedOptions(stages=2, sliced_stages=True, own_sharding=Sharding.OPTIMIZER),
            ["4x1", "2x2"],
        ),
    ],
)
def test_replicas_of_stages_divide_the_state_of_the_optimizer(able, expected):
    assert plans("1-8,parallel=hybrid", able, gpus=4) == expected


def test_the_own_plan_of_stages_divides_what_the_script_says():
    directive = Directive.parse("2-8,parallel=hybrid,unit=2")
    able = SupportedOptions(stages=2, sliced_stages=True, own_sharding=Sharding.OPTIMIZER)
    assert str(own_plan(directive, able, 4)) == "2x2+shard=optimizer"
    assert str(own_plan(directive, able, 2)) == "1x2"
    older = SupportedOptions(stages=2, own_sharding=Sharding.OPTIMIZER)
    assert str(own_plan(directive, older, 4)) == "2x2"
