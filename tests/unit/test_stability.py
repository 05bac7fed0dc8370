"""docs/stability.md names the modules that sites may import; their `__all__` says which names."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    (module, page)
    for line in (DOCS / "stability.md").read_text().splitlines()
    if line.startswith("|")
    for module in re.findall(r"`(slurm_elastic[\w.]*)`", line)[:1]
    for page in re.findall(r"\]\(([\w-]+\.md)[#)]", line)[:1]
]


def test_the_page_lists_the_importable_modules():
    assert {module for module, _ in ROWS} == {
        "slurm_elastic.training",
        "slurm_elastic.training.pipeline",
        "slurm_elastic.job.profile_request",
        "slurm_elastic.integrations.transformers",
        "slurm_elastic.integrations.accelerate",
        "slurm_elastic.integrations.lightning",
        "slurm_elastic.integrations.deepspeed",
        "slurm_elastic.policies.policy_protocol",
    }


@pytest.mark.parametrize(("module", "page"), ROWS)
def test_public_names_exist_and_are_documented(module, page):
    if ".training" in module:
        pytest.importorskip("torch")
    if ".integrations." in module:
        pytest.importorskip(module.rpartition(".")[2], reason="needs requirements/integrations.txt")
    imported = importlib.import_module(module)
    assert imported.__all__ == sorted(
        imported.__all__, key=lambda n: (not n.isupper(), not n[0].isupper(), n)
    )
    objects = {name: getattr(imported, name) for name in imported.__all__}
    for name, value in objects.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
    assert module.rpartition(".")[2] in (DOCS / page).read_text()


def test_the_version_is_public():
    slurm_elastic = importlib.import_module("slurm_elastic")
    assert slurm_elastic.__all__ == ["__version__"]
