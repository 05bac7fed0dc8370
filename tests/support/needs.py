"""What tests need of the machine, by name; the end of a run names those that did not run.

    pytestmark = needs("lua5.1")        # a program
    munged = require("munged")          # in a fixture, or for a whole module
    require("python/matplotlib")        # a Python package
    require("root"); require("docker")

Programs are also looked for where only root's PATH leads.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NoReturn

import pytest

#: What brings a program or a package here.
TOOLS = "as root: contrib/install-test-tools"
PACKAGES = "make venv"
REMEDIES = {
    "docker": "as root, or with Docker at hand: contrib/cluster/cluster up",
    "promtool": "as root, about 100 MB: apt-get install --no-install-recommends prometheus",
    "requirements/integrations.txt": "make test-integrations",
    "root": "run the tests as root",
}
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
#: Not of files: those are of the machine.
_REASON = re.compile(r"needs ([^\s/]\S*)$")
#: Of published data: tests/support/published_data.py.
_DATA = re.compile(r" is missing: (.+)$")


def needs(*names: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs all of these."""
    return pytest.mark.needs(*names)


def require(name: str) -> str:
    """Return where it is; skip the test, or the module that is being imported, if it is missing."""
    place = locate(name)
    if not place:
        lack(name)
    return place


def lack(name: str) -> NoReturn:
    """Skip the test, or the module that is being imported, as this is missing."""
    pytest.skip(f"needs {name}", allow_module_level=True)


def locate(name: str) -> str:
    """Return where a program or a package is; "" if it is missing."""
    kind, _, rest = name.rpartition("/")
    if kind == "python":
        spec = importlib.util.find_spec(rest)
        return str(spec.origin) if spec else ""
    if name == "root":
        return "" if os.geteuid() else "/root"
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SBIN])
    return shutil.which(name, path=path) or ""


def remedy(name: str) -> str:
    """Return the command that installs a program or package."""
    return PACKAGES if name.startswith("python/") else REMEDIES.get(name, TOOLS)


def summary(skips: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a line of skipped tests for each remedy, and one for reasons without a remedy.

    Args:
        skips: the id of each skipped test, and the reason of the skip.
    """
    missing: dict[str, Counter[str]] = {}
    others: Counter[str] = Counter()
    for test, reason in skips:
        file = test.partition("::")[0]
        if match := _REASON.search(reason):
            missing.setdefault(remedy(match[1]), Counter())[f"{file} ({match[1]})"] += 1
        elif match := _DATA.search(reason):
            missing.setdefault(match[1], Counter())[file] += 1
        else:
            others[reason.removeprefix("Skipped: ")] += 1
    for cure, files in missing.items():
        listed = ", ".join(f"{file} {count}" for file, count in sorted(files.items()))
        yield f"{files.total()} tests did not run: {listed}; {cure}"
    if others:
        listed = "; ".join(f"{reason} ({count})" for reason, count in sorted(others.items()))
        yield f"{others.total()} tests did not run for other reasons: {listed}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): see tests/support/needs.py")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            require(name)
