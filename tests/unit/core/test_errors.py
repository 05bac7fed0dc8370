"""Every exception of the package derives from one class, and the module's docstring shows all."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest

import slurm_elastic
from slurm_elastic.core import errors
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.errors import SlurmElasticError


def exceptions():
    """Exception classes defined in the package."""
    for info in pkgutil.walk_packages(slurm_elastic.__path__, "slurm_elastic."):
        try:
            module = importlib.import_module(info.name)
        except ImportError:  # of a framework that is not installed
            assert info.name.startswith("slurm_elastic.integrations.")
            continue
        for value in vars(module).values():
            if not inspect.isclass(value) or value.__module__ != info.name:
                continue
            if issubclass(value, BaseException):
                yield value


def drawn():
    """Name, base and module of each exception, from the tree in the docstring."""
    path = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ((?:[│├└─ ]{4})*)(\w+Error)(?: +([\w.]+))?$", line)
        if match:
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            yield match[2], path[depth - 1] if depth else "Exception", match[3] or "core.errors"


def test_every_exception_has_the_common_base_and_the_name_of_an_error():
    for error in exceptions():
        assert issubclass(error, SlurmElasticError), error
        assert error.__name__.endswith("Error"), error


def test_the_tree_shows_every_public_exception_below_its_base():
    public = {e for e in exceptions() if not e.__name__.startswith("_")}
    assert sorted(drawn()) == sorted(
        (e.__name__, e.__bases__[0].__name__, e.__module__.removeprefix("slurm_elastic."))
        for e in public
    )


@pytest.mark.parametrize("base", [SlurmElasticError, ValueError])
def test_one_class_catches_what_a_caller_knew_as_a_value_error(base):
    with pytest.raises(base, match="write 2-16"):
        Directive.parse("16-2")


def test_the_module_imports_nothing():
    script = (
        "import sys, slurm_elastic\nbefore = set(sys.modules)\n"
        "import slurm_elastic.core.errors\nprint(sorted(set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['slurm_elastic.core', 'slurm_elastic.core.errors']"
