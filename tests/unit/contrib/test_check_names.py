"""`contrib/check-names`: a name means one thing in the whole project."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "contrib" / "check-names"


@pytest.fixture
def check_names() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("check_names", str(SCRIPT))
    spec = importlib.util.spec_from_loader("check_names", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for path, text in {
        "one/plan.py": "class Plan: ...",
        "two/round.py": "class Plan: ...\nclass _Own: ...",
        "two/plan.py": "class _Own: ...",
        "two/__init__.py": "",
        "one/__init__.py": "",
    }.items():
        file = tmp_path / "project" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "project"


def test_each_repeated_name_is_told_with_its_files(check_names: ModuleType, package: Path) -> None:
    assert check_names.problems(package, {}) == [
        "module plan occurs 2 times: project/one/plan.py, project/two/plan.py",
        "class Plan occurs 2 times: project/one/plan.py, project/two/round.py",
    ]


def test_exceptions_count_only_while_they_are_needed(
    check_names: ModuleType, package: Path
) -> None:
    reasons = {"plan": "a test", "Plan": "a test", "Other": "a test"}
    assert check_names.problems(package, reasons) == ["exception Other is not needed: remove it"]


def test_a_folder_with_too_many_modules(check_names: ModuleType, package: Path) -> None:
    for number in range(check_names.MOST_MODULES):
        (package / "one" / f"module_{number}.py").write_text("")
    (problem,) = check_names.problems(package, {"plan": "a test", "Plan": "a test"})
    assert problem == "project/one has 21 modules, above 20: make a subpackage"
