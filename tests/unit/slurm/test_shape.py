"""Fields of `scontrol update` for a job's new shape."""

import dataclasses

import pytest

from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.submission import Submission
from slurm_elastic.slurm import shape

TYPES = {"a100": 4, "v100": 8}


def job(directive="1-8", **submitted):
    return Job(
        job_id=7,
        display_id="7",
        name="",
        user="alice",
        uid=2001,
        state=JobState.PENDING,
        partition="gpu",
        submission=Submission(Directive.parse(directive), submitted),
    )


def test_even_shares_are_asked_per_node_and_uneven_ones_in_all():
    even = shape.sized(job(), Allocation.of("a100", {"n1": 2, "n2": 2}), time_limit_s=None)
    assert (even["NumNodes"], even["TresPerNode"], even["TresPerJob"]) == (
        "2-2",
        "gres/gpu:a100:2",
        "",
    )
    uneven = shape.sized(job(), Allocation.of("a100", {"n1": 4, "n2": 2}), time_limit_s=None)
    assert (uneven["TresPerNode"], uneven["TresPerJob"]) == ("", "gres/gpu:a100:6")


@pytest.mark.parametrize(
    ("submitted", "cpus", "memory"),
    [
        ({}, "4", None),
        ({"cpus_per_task": 2, "min_mem_per_node": 1000}, "8", "4000"),
        ({"tres_per_node": "gres/gpu:2", "min_mem_per_node": 1000}, "2", "2000"),
        ({"num_tasks": 4, "tres_per_job": "gres/gpu:4", "cpus_per_task": 3}, "12", None),
        ({"cpus_per_tres": "gres/gpu:2", "mem_per_tres": "gres/gpu:400"}, None, None),
    ],
)
def test_cpus_and_memory_go_with_the_gpus_of_a_node(submitted, cpus, memory):
    fields = shape.sized(job(**submitted), Allocation.of("a100", {"n1": 4}), time_limit_s=None)
    assert (fields.get("MinCPUsNode"), fields.get("MinMemoryNode")) == (cpus, memory)
    assert fields.get("CPUsPerTask") == cpus


def test_a_default_of_the_site_for_the_cpus_of_each_gpu_stays():
    """A number of ours would replace DefCpuPerGPU."""
    waits = dataclasses.replace(job(ntasks_per_node=2), cpus_follow_gpus=True)
    fields = shape.sized(waits, Allocation.of("a100", {"n1": 4}), time_limit_s=None)
    assert not {"CPUsPerTask", "MinCPUsNode"} & fields.keys()
    assert (fields["NumTasks"], fields["TasksPerNode"]) == ("1", "1")


def test_time_left_is_never_rounded_up():
    fields = shape.sized(job(), Allocation.of("a100", {"n1": 1}), time_limit_s=3_659)
    assert fields["TimeLimit"] == "01:00:00"


def test_back_in_the_queue_the_users_own_constraints_hold_again():
    fields = shape.queued(
        job("2-8", req_nodes="n[1-2]", reservation="course"),
        Directive.parse("2-8"),
        gpus_per_node=TYPES,
    )
    assert (fields["ReqNodeList"], fields["ReservationName"]) == ("n[1-2]", "course")
    assert (fields["NumNodes"], fields["TresPerNode"]) == ("1-1", "gres/gpu:2")


def test_a_min_wider_than_a_node_asks_for_one_type():
    fields = shape.queued(job("8"), Directive.parse("8,types=a100:v100"), gpus_per_node=TYPES)
    assert (fields["NumNodes"], fields["TresPerNode"]) == ("2-2", "gres/gpu:a100:4")


def test_a_pending_job_is_queued_at_a_size_that_it_may_have():
    listed = Directive.parse("1-8,sizes=2:4,types=a100")
    assert shape.queued(job("8"), listed, gpus_per_node=TYPES)["TresPerNode"] == "gres/gpu:a100:2"
    barred = listed.excluding([("a100", 2)])
    assert shape.queued(job("8"), barred, gpus_per_node=TYPES)["TresPerNode"] == "gres/gpu:a100:4"
    fixed = Directive.parse("2,types=a100").excluding([("", 2)])
    assert shape.queued(job("8"), fixed, gpus_per_node=TYPES)["TresPerNode"] == "gres/gpu:2"


def test_a_companion_gets_its_node_and_what_its_base_has_left():
    base = Job(
        job_id=7, display_id="7", name="", user="alice", uid=2001, state=JobState.RUNNING,
        partition="gpu", start_time=1000.0, time_limit_s=3600,
    )  # fmt: skip
    place = Allocation.of("a100", {"n2": 3})
    fields = shape.placed_companion(base, place, reservation="selastic_1", now=1090.0)
    assert fields["TimeLimit"] == "00:59:00"
    assert (fields["ReqNodeList"], fields["TresPerNode"]) == ("n2", "gres/gpu:a100:3")
    assert fields["ReservationName"] == "selastic_1"
    assert "WCKey" not in fields
    base = dataclasses.replace(base, wckey="paper")
    fields = shape.placed_companion(base, place, reservation="", now=1090.0)
    assert fields["WCKey"] == "paper"


def test_a_request_for_gpus_of_each_socket_is_replaced():
    """Slurm refuses one of a type beside one without a type."""
    sockets = {"tres_per_socket": "gres/gpu:1", "sockets_per_node": 2, "cpus_per_task": 4}
    own = job("1-8", **sockets)
    assert shape.submitted_gpus(own) == 2
    fields = shape.sized(own, Allocation.of("a100", {"n1": 4}), time_limit_s=None)
    assert (fields["TresPerNode"], fields["TresPerSocket"]) == ("gres/gpu:a100:4", "")
    assert fields["MinCPUsNode"] == "8"
    assert shape.queued(own, own.directive, gpus_per_node=TYPES)["TresPerSocket"] == ""
    assert "TresPerSocket" not in shape.sized(
        job("1-8"), Allocation.of("a100", {"n1": 4}), time_limit_s=None
    )


def test_half_of_a_gpu_is_asked_for_by_shards():
    half = Allocation.of("a100", {"n1": 1}, half=True)
    fields = shape.sized(job(), half, time_limit_s=None, shards=2)
    assert (fields["NumNodes"], fields["TresPerNode"]) == ("1-1", "gres/shard:2")
    waits = dataclasses.replace(job(), gpus=1)
    assert "a whole GPU" in shape.difference(waits, half)
    divided = dataclasses.replace(waits, shards=2)
    assert shape.difference(divided, half) == ""
    assert "half of a GPU" in shape.difference(divided, half.whole)
    assert shape.describe(half) == "half of 1 a100 on n1"
