"""contrib/packaging: what is staged is in a package, and the libraries are those of the lock."""

import fnmatch
import importlib.machinery
import importlib.util
import re
from pathlib import Path

import pytest

from slurm_elastic.cli.installation import site_files

ROOT = Path(__file__).parents[3]
PACKAGING = ROOT / "contrib" / "packaging"
#: Staged, but not for packages: sysusers.d and the plugin are made by the builders themselves.
OWN_WAY = (
    "usr/lib/sysusers.d/",
    "usr/share/slurm-elastic/plugins/",
    "usr/share/slurm-elastic/etc/",
)


def _script():
    loader = importlib.machinery.SourceFileLoader("packaging_build", str(PACKAGING / "build"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build():
    return _script()


def staged():
    """The files that `selastic install --prefix /usr` writes, without the leading /."""
    files = site_files.site_files(Path("/usr"), site_files.NODE_KINDS, commands=None, source=ROOT)
    names = {str(file.target.relative_to("/")) for file in files}
    return {name for name in names if not name.startswith(OWN_WAY)}


def test_each_file_is_in_one_debian_package():
    lists = {p.stem: p.read_text().split() for p in (PACKAGING / "debian").glob("*.install")}
    for file in staged():
        packages = [name for name, parts in lists.items() if any(_covers(p, file) for p in parts)]
        assert len(packages) == 1, f"{file} is in {packages}"


def _covers(part, file):
    part = part.removeprefix("debian/tmp/")
    return fnmatch.fnmatch(file, part) or file.startswith(f"{part}/")


def test_each_file_is_in_the_rpm():
    spec = (PACKAGING / "rpm" / "slurm-elastic.spec").read_text("utf-8")
    known = {"_mandir": "/usr/share/man", "_datadir": "/usr/share", "_sysconfdir": "/etc"}
    known |= dict(re.findall(r"^%global (\w+) (/\S+|%\S+)$", spec, re.MULTILINE))
    listed = spec[spec.index("\n%files\n") :]
    for _ in range(3):
        listed = re.sub(r"%\{(\w+)\}", lambda m: known.get(m[1], m[0]), listed)
    parts = [line.split()[-1].lstrip("/") for line in listed.splitlines() if "/" in line]
    for file in staged():
        assert any(_covers(part, file) for part in parts), file


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_bundled_libraries_are_locked_with_hashes_for_each_python(build, python):
    names = build.closure()
    assert names > {r.name for r in build.controller_requirements()}
    text = build.locked(names, python)
    heads = re.findall(r"^(\S+)==\S+ \\$", text, re.MULTILINE)
    assert sorted(heads) == sorted(names)
    assert ";" not in text
    assert text.count("--hash=sha256:") >= len(names)


def test_debian_has_a_package_for_each_library(build):
    assert "python3-highspy" in build.debian_libraries().split(", ")
