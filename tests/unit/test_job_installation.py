"""`pip install slurm-elastic` in a researcher's environment: few packages, and all of it works."""

import fnmatch
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import grimp
import pytest
from packaging.requirements import Requirement

from slurm_elastic.job.site_command import CONTROLLER_PACKAGES
from tests.support.needs import require

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
REQUIRED = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
EXTRAS = {
    name: [Requirement(text) for text in texts]
    for name, texts in PROJECT["project"]["optional-dependencies"].items()
}
#: Modules that jobs import, and the commands, which print one line where they cannot run.
FOR_JOBS = (
    "slurm_elastic.job",
    "slurm_elastic.training",
    "slurm_elastic.integrations",
    "slurm_elastic.cli.console_scripts",
)
#: Which each of the integrations has for itself.
FRAMEWORKS = {"accelerate", "deepspeed", "lightning", "transformers"}
HEAVY = set(CONTROLLER_PACKAGES) - {"numpy"}


def below(module, packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.fixture(scope="module")
def imports():
    """Imports of the modules for jobs, at any depth, and of all that they reach."""
    graph = grimp.build_graph("slurm_elastic", include_external_packages=True, cache_dir=None)
    # The commands reach the controller after they have seen that it is installed.
    for target in (
        *("slurm_elastic.cli.main", "slurm_elastic.cli.reason_text"),
        "slurm_elastic.controller.daemon",
    ):
        assert graph.direct_import_exists(
            importer="slurm_elastic.cli.console_scripts", imported=target
        )
        graph.remove_import(importer="slurm_elastic.cli.console_scripts", imported=target)
    found, left = {}, [module for module in graph.modules if below(module, FOR_JOBS)]
    while left:
        module = left.pop()
        if module not in found and below(module, ["slurm_elastic"]):
            found[module] = graph.find_modules_directly_imported_by(module)
            left += found[module]
    assert len(found) > 80
    return found


def test_jobs_import_numpy_torch_and_nothing_else(imports):
    others = {
        imported: module
        for module, targets in imports.items()
        for imported in targets
        if not below(imported, ["slurm_elastic"]) and imported not in sys.stdlib_module_names
    }
    assert set(others) <= {"numpy", "tomli", "torch", *FRAMEWORKS}, others
    for framework in FRAMEWORKS & set(others):
        users = {module for module, targets in imports.items() if framework in targets}
        assert users == {f"slurm_elastic.integrations.{framework}"}


def test_what_jobs_import_is_checked_for_the_oldest_python(imports):
    assert PROJECT["project"]["requires-python"] == ">=3.10"
    versions = PROJECT["tool"]["ruff"]["per-file-target-version"]
    globs = []
    for glob, version in versions.items():
        assert version == "py310"
        head, words, tail = re.fullmatch(r"(.*?)(?:\{(.*)\})?([^{}]*)", glob).groups()
        globs += [f"{head}{word}{tail}" for word in (words or "").split(",")]
    for module in imports:
        path = module.replace(".", "/")
        file = f"{path}.py" if (ROOT / f"{path}.py").exists() else f"{path}/__init__.py"
        if file.count("/") > 1 or file.startswith("slurm_elastic/fabric"):
            shown = [glob for glob in globs if fnmatch.fnmatch(file, glob)]
            assert shown or file.endswith("__init__.py"), f"{file}: per-file-target-version"
    # mypy follows imports from these, and checks each name against the release of Python.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "mypy --python-version 3.10 $(IN_JOBS)" in makefile
    (parts,) = re.findall(
        r"^IN_JOBS = \$\(addprefix slurm_elastic/,(.*)\)$", makefile, re.MULTILINE
    )
    assert {"integrations", "job", "training", "cli/console_scripts.py"} <= set(parts.split())


def test_nothing_of_the_environment_is_replaced():
    # numpy 1.21 is the first with builds for Python 3.10: any that is there is new enough.
    assert {r.name: str(r.specifier) for r in REQUIRED} == {"numpy": ">=1.21", "tomli": ">=1.1"}
    (tomli,) = (r for r in REQUIRED if r.name == "tomli")
    assert tomli.marker.evaluate({"python_version": "3.10"})
    assert not tomli.marker.evaluate({"python_version": "3.11"})
    for extra, requirements in EXTRAS.items():
        assert "torch" not in {r.name for r in requirements}, extra


def test_the_extra_has_what_the_commands_look_for():
    wanted = {r.name.replace("-", "_") for r in EXTRAS["controller"]}
    assert wanted == set(CONTROLLER_PACKAGES)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with the wheel of this tree and no other package; its folder."""
    folder = tmp_path_factory.mktemp("job")
    require("python/hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    install = ["install", "--no-index", "--no-deps", "--no-compile", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--python", folder / "env/bin/python"]
    subprocess.run([*pip, *install, wheel], check=True, capture_output=True)
    return folder / "env"


def run(installed, *words, **variables):
    env = {"PATH": f"{installed}/bin:/usr/bin:/bin", "HOME": "/nowhere", **variables}
    return subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd="/")


def import_all(installed, *packages):
    """Import all modules of these packages; return the modules that came with them."""
    program = f"""
import importlib, pkgutil, sys
try:
    import torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.optim
except ImportError:
    pass
before = set(sys.modules)
for name in {packages!r}:
    package = importlib.import_module("slurm_elastic." + name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(package.__file__)
print(*set(sys.modules) - before)
"""
    done = run(installed, f"{installed}/bin/python", "-I", "-c", program)
    assert done.returncode == 0, done.stderr
    place, modules = done.stdout.splitlines()
    assert place.startswith(str(installed))
    return {module.partition(".")[0] for module in modules.split()}


def test_the_parts_without_torch_need_the_standard_library_only(installed):
    tops = import_all(installed, "core", "rpc", "job")
    assert tops <= sys.stdlib_module_names | {"slurm_elastic"}


@pytest.mark.torch
def test_the_library_needs_torch_and_numpy_only(installed):
    site = Path(require("python/torch")).parents[1]
    (place,) = installed.glob("lib/python3*/site-packages")
    link = place / "torch-of-the-tests.pth"
    link.write_text(f"{site}\n")
    try:
        tops = import_all(installed, "training")
    finally:
        link.unlink()
    assert not tops & HEAVY


def test_esrun_has_help(installed):
    done = run(installed, "esrun", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "esrun [" in done.stdout


def test_esbatch_submits(installed, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "sbatch $*"\n')
    sbatch.chmod(0o755)
    path = f"{installed}/bin:{tmp_path}:/usr/bin:/bin"
    words = ("--elastic=1-2", "--gres=gpu:1", "--wrap=true")
    done = run(installed, "esbatch", *words, PATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--comment=elastic:1-2" in done.stdout


def test_esrun_starts_a_program(installed):
    done = run(installed, "esrun", "--local", "2", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"]


@pytest.mark.parametrize("words", [("selastic", "status"), ("selasticd", "--print-config")])
def test_a_command_of_the_controller_says_in_one_line_what_it_needs(installed, words):
    done = run(installed, *words)
    missing = ", ".join(sorted(CONTROLLER_PACKAGES))
    assert done.stderr == (
        f"{words[0]}: not installed: {missing} (without the extra `controller` there are only the"
        f" parts for jobs): {installed}/bin/python -m pip install 'slurm-elastic[controller]', or"
        f" run the site's {words[0]}\n"
    )
    assert (done.returncode, done.stdout) == (1, "")


@pytest.fixture
def site(tmp_path):
    """The folder of the site's commands, which print their name and arguments."""
    for name in ("esrun", "esbatch", "selastic"):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\necho "site {name} $*"\n')
        command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
@pytest.mark.parametrize("name", ["esrun", "esbatch", "selastic"])
def test_an_activated_environment_leaves_commands_to_the_site(installed, site, name, variable):
    path = f"{installed}/bin:{site}:/usr/bin:/bin"
    done = run(installed, name, "--x", "a b", PATH=path, **{variable: str(installed)})
    assert (done.stdout, done.returncode) == (f"site {name} --x a b\n", 0), done.stderr


def test_without_a_command_of_the_site_it_is_the_environments_own(installed, site):
    active = {"VIRTUAL_ENV": str(installed)}
    for path in (f"{installed}/bin:/usr/bin:/bin", f"{site}:{installed}/bin:/usr/bin:/bin"):
        esrun = f"{installed}/bin/esrun"
        assert run(installed, esrun, "--version", PATH=path, **active).stdout.startswith("esrun 0")
    # The same environment twice on the path, or a link to its command, is no other command.
    link = site / "links"
    link.mkdir()
    (link / "esrun").symlink_to(f"{installed}/bin/esrun")
    path = f"{installed}/bin:{installed}/bin:{link}:/usr/bin:/bin"
    assert run(installed, "esrun", "--version", PATH=path, **active).stdout.startswith("esrun 0")


def test_an_environment_that_is_not_activated_is_used_as_it_is(installed, site):
    """The site's own, for example: a researcher's environment later on the path does not count."""
    path = f"{installed}/bin:{site}:/usr/bin:/bin"
    done = run(installed, "esrun", "--version", PATH=path, CONDA_PREFIX="/opt/conda")
    assert done.stdout.startswith("esrun 0")


def test_a_command_of_the_site_that_cannot_be_started_is_left_out(installed, site):
    (site / "esrun").write_text("#!/nowhere/sh\n")
    path = f"{installed}/bin:{site}:/usr/bin:/bin"
    done = run(installed, "esrun", "--version", PATH=path, VIRTUAL_ENV=str(installed))
    assert done.stdout.startswith("esrun 0")
    assert done.stderr == f"esrun: {site}/esrun: No such file or directory\n"
    (site / "esrun").chmod(0o644)
    done = run(installed, "esrun", "--version", PATH=path, VIRTUAL_ENV=str(installed))
    assert (done.stdout[:7], done.stderr) == ("esrun 0", "")
