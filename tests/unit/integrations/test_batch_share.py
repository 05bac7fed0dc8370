"""Division of the global batch: exact wherever ranks can share it, else as near as they can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.integrations.batch_share import kept_global_batch, share


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 300))
def test_a_share_is_exact_where_it_can_be(batch: int, per_rank: int, world: int) -> None:
    planned = share(batch, per_rank=per_rank, world=world)
    assert 1 <= planned.per_rank <= per_rank
    assert planned.accumulation >= 1
    assert (planned.actual == batch) == (batch % world == 0)
    assert bool(planned.remark) == (batch % world != 0)
    others = (batch // world * world, (batch // world + 1) * world)
    assert all(abs(planned.actual - batch) <= abs(o - batch) for o in others if o)


@given(st.integers(1, 4096), st.integers(1, 512), st.integers(1, 300))
def test_no_fewer_micro_batches_would_do(batch: int, per_rank: int, world: int) -> None:
    planned = share(batch, per_rank=per_rank, world=world)
    samples = planned.per_rank * planned.accumulation
    for fewer in range(1, planned.accumulation):
        assert samples % fewer or samples // fewer > per_rank


def test_what_cannot_be_shared_is_said() -> None:
    assert share(64, per_rank=8, world=3).remark == (
        "global batch 64: 3 ranks cannot share it evenly, steps take 63 samples; allow only sizes"
        " that divide it (sizes= of --elastic)"
    )
    assert share(2, per_rank=8, world=4).actual == 4


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "8", None])
def test_numbers_below_one_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"per_rank: .* is invalid: expected a number of at least"):
        share(8, per_rank=wrong, world=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="global_batch: "):
        share(wrong, per_rank=8, world=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "batch"),
    [
        ({}, 16),
        ({"WORLD_SIZE": "2"}, 32),  # torchrun
        ({"WORLD_SIZE": "2", "SLURM_ELASTIC_START_WORLD_SIZE": "4"}, 64),
        ({"SLURM_ELASTIC_START_WORLD_SIZE": "4", "SLURM_ELASTIC_MICRO_BATCHES": "4"}, 32),
        ({"SLURM_ELASTIC_START_WORLD_SIZE": "1", "SLURM_ELASTIC_MICRO_BATCHES": "16"}, 128),
        ({"SLURM_ELASTIC_GLOBAL_BATCH": "256", "SLURM_ELASTIC_MICRO_BATCHES": "16"}, 256),
        ({"SLURM_ELASTIC_GLOBAL_BATCH": "x", "WORLD_SIZE": "-3"}, 16),
    ],
)
def test_the_batch_that_is_kept(environment: dict[str, str], batch: int) -> None:
    assert kept_global_batch(per_rank=8, accumulation=2, environment=environment) == batch
