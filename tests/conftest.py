"""Settings of all tests."""

import gc
import os
import signal
from pathlib import Path

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.needs", "tests.support.outcomes"]

# No test asserts a time: machines are shared and slow at times. The examples are the same in each
# run; --hypothesis-profile=search looks for others.
settings.register_profile(
    "project",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize=True,
)
settings.register_profile("search", settings.get_profile("project"), derandomize=False)
settings.load_profile("project")


def pytest_addoption(parser):
    parser.addoption("--data", metavar="DIR", help="folder of the published data; docs/data.md")


def pytest_configure(config):
    # A shell starts what it runs in the background with SIGINT ignored, and programs inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("data"):
        os.environ["SELASTIC_DATA"] = str(Path(config.getoption("data")).resolve())


def pytest_collection_finish():
    # Modules and tests stay to the end: garbage collections during the tests leave them out.
    gc.collect()
    gc.freeze()
