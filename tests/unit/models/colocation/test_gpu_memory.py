import json

import pytest

from slurm_elastic.models.colocation.gpu_memory import GpuMemory

GB = 10**9


def reported(*rows):
    memory = GpuMemory()
    for application, peak, capacity in rows:
        memory.record(application, "a100", peak=peak * GB, capacity=capacity * GB)
    return memory


@pytest.mark.parametrize(
    ("rows", "fits"),
    [
        ([], True),
        ([("one", 10, 40)], False),
        ([("one", 20, 40), ("two", 16, 40)], True),
        ([("one", 20, 40), ("two", 17, 40)], False),
        # The smaller GPU counts, and the most that an application has used.
        ([("one", 20, 40), ("two", 16, 30)], False),
        ([("one", 30, 40), ("one", 20, 40), ("two", 16, 40)], False),
        # What others report does not matter.
        ([("three", 1, 1)], True),
    ],
)
def test_two_applications_fit_with_a_tenth_to_spare(rows, fits):
    memory = reported(*rows)
    for known in (memory, GpuMemory.of_json(json.loads(json.dumps(memory.to_json())))):
        assert known.fits("a100", "one", "two") is fits
        assert known.fits("v100", "one", "two")


def test_rows_that_cannot_be_read_are_left_out():
    rows = [["one", "a100", 20 * GB, 40 * GB], ["two", "a100", "many", 1], 7, ["two"]]
    memory = GpuMemory.of_json(rows)
    assert memory.to_json() == rows[:1]
    assert GpuMemory.of_json({"a": 1}).to_json() == []
