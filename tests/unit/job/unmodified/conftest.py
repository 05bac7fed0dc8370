"""What tests of unmodified scripts share."""

from collections.abc import Iterator

import pytest

from tests.support.job.script_job import ScriptJob


@pytest.fixture(autouse=True)
def _closed_runs() -> Iterator[None]:
    yield
    ScriptJob.close_all()
