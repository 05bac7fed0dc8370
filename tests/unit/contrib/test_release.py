"""contrib/release on a copy of the project: what it refuses, what it builds and what it changes."""

import importlib.machinery
import importlib.util
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CHANGELOG = """# Changelog

## Unreleased

### Added

- A thing that a user notices.

## 0.0.1 - 2026-01-01

- The first.
"""
#: What the two distributions are made of, and nothing that only slows the copy.
FILES = ("LICENSE", "README.md", "SECURITY.md", "pyproject.toml", ".gitignore", "docs/index.md")
FOLDERS = ("contrib/completion", "docs/man", "etc", "plugins", "slurm_elastic", "wrappers")


def _script():
    loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "contrib" / "release"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", loader))
    loader.exec_module(module)
    return module


release = _script()


def git(project, *words):
    command = ["git", *words]
    return subprocess.run(command, cwd=project, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A clean tree of version 0.1.0 with something unreleased."""
    root = tmp_path / "project"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.o", "found", "fuzzer")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, root / file)
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "tests" / "unit" / "test_x.py").touch()
    (root / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    version = root / "slurm_elastic" / "__init__.py"
    version.write_text('"""A package."""\n\n__version__ = "0.1.0"\n', encoding="utf-8")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "t")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "t@example.org")
    git(root, "init", "-q")
    commit(root)
    return root


def commit(project):
    git(project, "add", "-A")
    git(project, "commit", "-qm", "x")


def refusal(capsys, project, *words):
    """The one line of a release that cannot be made; nothing is changed by it."""
    before = git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")
    assert release.main(["--root", str(project), *words]) == 2
    assert (git(project, "status", "--porcelain"), git(project, "rev-parse", "HEAD")) == before
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_version_of_another_form_or_below_the_present_one_is_refused(capsys, project):
    for version in ("1", "0.2", "v0.2.0", "0.2.0rc1", "0.02.0", "0.2.0\n", "0.2.²"):
        said = refusal(capsys, project, version)
        expected = f"{version!r} is invalid: expected X.Y.Z, for example 0.2.0"
        assert said == f"release: version: {expected}\n"
    said = refusal(capsys, project, "0.0.9")
    assert said == "release: version: 0.0.9 is lower than the present 0.1.0\n"


def test_a_tree_with_changes_is_refused(capsys, project):
    (project / "new.txt").touch()
    said = refusal(capsys, project, "0.2.0", "--commit")
    assert said == "release: tree: 1 files differ from the last commit; commit first\n"


def test_a_changelog_without_news_is_refused(capsys, project):
    (project / "CHANGELOG.md").write_text(
        "# Changelog\n\n## Unreleased\n\n## 0.0.1 - 2026\n\n- x\n"
    )
    commit(project)
    assert "nothing to release" in refusal(capsys, project, "0.2.0")


def test_a_distribution_without_a_manual_page_is_no_release(capsys, project):
    (project / "docs" / "man" / "esrun.1").unlink()
    commit(project)
    assert release.main(["--root", str(project), "0.2.0", "--commit"]) == 1
    said = capsys.readouterr().err
    assert said == "release: slurm_elastic-0.2.0.tar.gz: docs/man/esrun.1 is missing\n"
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "tag") == ""


def test_a_release_is_built_checked_committed_and_tagged(capsys, project):
    words = ["--root", str(project), "0.2.0", "--date", "2026-11-30"]
    assert release.main([*words, "--dry-run"]) == 0
    assert git(project, "status", "--porcelain") == ""
    assert not (project / "dist").exists()

    assert release.main([*words, "--commit"]) == 0
    assert git(project, "status", "--porcelain") == ""
    assert git(project, "tag").split() == ["v0.2.0"]
    changed = git(project, "show", "--name-only", "--format=%s", "HEAD").splitlines()
    assert changed == ["Release 0.2.0", "", "CHANGELOG.md", "slurm_elastic/__init__.py"]
    assert (project / "CHANGELOG.md").read_text() == CHANGELOG.replace(
        "## Unreleased\n", "## Unreleased\n\n## 0.2.0 - 2026-11-30\n"
    )
    assert '__version__ = "0.2.0"' in (project / "slurm_elastic" / "__init__.py").read_text()
    with zipfile.ZipFile(project / "dist" / "slurm_elastic-0.2.0-py3-none-any.whl") as wheel:
        assert '"0.2.0"' in wheel.read("slurm_elastic/__init__.py").decode()
    with tarfile.open(project / "dist" / "slurm_elastic-0.2.0.tar.gz") as sdist:
        assert "slurm_elastic-0.2.0/CHANGELOG.md" in sdist.getnames()

    capsys.readouterr()
    said = refusal(capsys, project, "0.2.0")
    assert said == "release: version: 0.2.0 is released already (tag v0.2.0)\n"


def test_the_version_stands_in_one_place():
    pyproject = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'dynamic = ["version"]' in pyproject
    assert "\nversion = " not in pyproject
