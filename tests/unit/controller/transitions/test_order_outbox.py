"""Orders of jobs: the examples of the module."""

import doctest

from slurm_elastic.controller.transitions import order_outbox


def test_examples():
    assert doctest.testmod(order_outbox).failed == 0
