"""Settings of all tests."""

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.needs", "tests.support.outcomes"]

# No test asserts a time: machines are shared and slow at times.
settings.register_profile(
    "project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("project")
