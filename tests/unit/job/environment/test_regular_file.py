"""Files of a user that may be anything: only regular ones are read."""

import os
from pathlib import Path

import pytest

from slurm_elastic.job.environment.regular_file import regular_file


def test_what_is_in_a_fifo_stays_there(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    ours = os.open(path, os.O_RDWR)
    os.write(ours, b"for another reader")
    with pytest.raises(OSError, match="no regular file"), regular_file(str(path)):
        pass
    assert os.read(ours, 100) == b"for another reader"
    os.close(ours)
    (tmp_path / "file").write_bytes(b"text")
    with regular_file(str(tmp_path / "file")) as descriptor:
        assert os.read(descriptor, 10) == b"text"
