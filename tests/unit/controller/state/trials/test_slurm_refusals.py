"""Sizes that cannot be had either when Slurm has refused one."""

import pytest

from slurm_elastic.controller.state.trials.slurm_refusals import is_temporary, sizes_refused_with
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason

LIMIT = Reason("not-started", slurm_reason="QOSMaxGRESPerNode")
TOPOLOGY = Reason("not-started", slurm_reason="BadConstraints")
ONE = Allocation.of("a100", {"n1": 1})


@pytest.mark.parametrize(
    ("reason", "temporary"),
    [
        (LIMIT, True),
        (Reason("slurm-refused", error="x"), True),
        (TOPOLOGY, False),
        (Reason("program-failed", exit_code=1), False),
    ],
)
def test_only_limits_may_be_over_later(reason, temporary):
    assert is_temporary(reason) == temporary


@pytest.mark.parametrize(
    ("planned", "reason", "old", "sizes"),
    [
        ({"n2": 8}, LIMIT, ONE, [5, 6, 7]),
        ({"n2": 8}, LIMIT, None, []),
        ({"n2": 8}, LIMIT, Allocation.of("v100", {"n1": 1}), []),
        ({"n1": 4, "n2": 3}, TOPOLOGY, ONE, [5, 6, 7, 8]),
        ({"n2": 4}, TOPOLOGY, ONE, []),
    ],
)
def test_sizes_that_slurm_would_refuse_as_well(planned, reason, old, sizes):
    assert list(sizes_refused_with(Allocation.of("a100", planned), reason, old=old)) == sizes
