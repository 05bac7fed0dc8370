"""Plain values of a pickle, which is listed and not executed."""

import contextlib
import doctest

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.job.unmodified import pickle_outline
from slurm_elastic.job.unmodified.pickle_outline import outline


def test_examples() -> None:
    assert doctest.testmod(pickle_outline).failed == 0


@given(data=st.binary(max_size=200))
def test_any_bytes_are_no_pickle_or_one(data: bytes) -> None:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        outline(data)
