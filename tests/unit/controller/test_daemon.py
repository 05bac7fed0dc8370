"""Two daemons never share a ledger."""

import os

import pytest

from slurm_elastic.controller.daemon import sole_user
from slurm_elastic.controller.state.ledger import LedgerError


def test_the_second_is_refused_until_the_first_has_gone(tmp_path):
    first = sole_user(tmp_path)
    with pytest.raises(LedgerError, match="give each its own state_dir"):
        sole_user(tmp_path)
    os.close(first)
    os.close(sole_user(tmp_path))
