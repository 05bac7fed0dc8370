"""requirements/dev.txt, which `make lock` writes and `contrib/install-dev` installs."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "requirements" / "dev.txt").read_text("utf-8")
#: name → versions, by Python version and system
LOCKED: dict[str, list[str]] = {}
for name, version in re.findall(r"^([a-zA-Z0-9._-]+)==([^ ;\\]+)", LOCK, re.MULTILINE):
    LOCKED.setdefault(canonicalize_name(name), []).append(version)


def wanted():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    build = (ROOT / "requirements" / "build.in").read_text("utf-8").splitlines()
    return [
        Requirement(text)
        for text in (
            *project["project"]["dependencies"],
            *project["project"]["optional-dependencies"]["controller"],
            *project["project"]["optional-dependencies"]["dev"],
            *project["build-system"]["requires"],
            *(line for line in build if not line.startswith("#")),
        )
    ]


def test_it_locks_all_that_pyproject_asks_for_in_versions_that_it_allows():
    for requirement in wanted():
        if requirement.marker and not requirement.marker.evaluate({"python_version": "3.11"}):
            continue  # for jobs on an older Python than that of the controller
        versions = LOCKED.get(canonicalize_name(requirement.name), [])
        assert versions, f"{requirement.name} is not locked: make lock"
        for version in versions:
            assert requirement.specifier.contains(version), f"{requirement}: make lock"


@pytest.mark.parametrize("name", ["dev.txt", "frameworks.txt"])
def test_every_package_has_hashes_and_no_host_is_named(name):
    text = (ROOT / "requirements" / name).read_text("utf-8")
    entries = re.split(r"\n(?=[a-zA-Z])", text.strip())[1:]
    assert len(entries) == len(re.findall(r"^[a-zA-Z0-9._-]+==", text, re.MULTILINE)) > 20
    for entry in entries:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}$", entry, re.MULTILINE), entry[:60]
    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links", text)


def test_frameworks_are_locked_as_named_and_use_debians_torch():
    named = (ROOT / "requirements" / "frameworks.in").read_text("utf-8").splitlines()
    locked = (ROOT / "requirements" / "frameworks.txt").read_text("utf-8")
    wanted = [line for line in named if not line.startswith("#")]
    assert len(wanted) >= 3
    for line in wanted:
        assert re.search(rf"^{re.escape(line)} ", locked, re.MULTILINE), f"{line}: make lock"
    assert not re.search(r"^(torch|numpy|triton|nvidia-[^=]*)==", locked, re.MULTILINE)


def test_the_development_environment_is_installed_from_it():
    script = (ROOT / "contrib" / "install-dev").read_text("utf-8")
    assert "--require-hashes" in script
    assert "torch" not in LOCKED, "its builds have hashes of their own"
