"""Layers that ranks share compute what one rank computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.trainings.pipeline_ranks import spawn
from tests.support.trainings.tensor_ranks import (
    CHUNKS,
    differences_and_chunks,
    dropped_places,
    evaluated_difference,
)


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (3, 4), (4, 0)])
def test_results_and_gradients_are_those_of_one_rank_with_any_number_of_chunks(
    tmp_path: Path, size: int, chunks: int
) -> None:
    for differences, any_values, whole_numbers in spawn(
        tmp_path, size, differences_and_chunks, chunks
    ):
        if chunks:
            worst = max(differences, key=differences.__getitem__)
            assert differences[worst] < 1e-10, worst
        for by_chunks in whole_numbers:
            for count in CHUNKS[1:]:
                pairs = zip(by_chunks[count], by_chunks[1], strict=True)
                assert all(torch.equal(one, other) for one, other in pairs), count
        # BLAS multiplies few rows in another order than many, so that roundings may differ.
        for by_chunks in any_values:
            for count in CHUNKS[1:]:
                for one, other in zip(by_chunks[count], by_chunks[1], strict=True):
                    assert float((one - other).abs().max()) <= 1e-6 * float(other.abs().max())


def test_a_divided_transformer_evaluates_as_one_rank(tmp_path: Path) -> None:
    assert max(spawn(tmp_path, 2, evaluated_difference)) < 1e-6


def test_each_rank_drops_other_places_and_shares_the_numbers_that_follow(tmp_path: Path) -> None:
    (first, after), (second, as_after) = spawn(tmp_path, 2, dropped_places)
    assert after == as_after
    for kept in (first, second):
        assert 0.3 < float(kept.float().mean()) < 0.7
    assert not torch.equal(first, second)
