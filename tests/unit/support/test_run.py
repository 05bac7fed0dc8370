"""The end of a test run: second tries, and tests that did not run for lack of a program."""

import re
from pathlib import Path

import pytest

from tests import run as module
from tests.run import SECOND_TRIES, Run
from tests.support import needs
from tests.support.outcomes import Outcome

ROOT = Path(__file__).parents[3]
#: Fails the first time it runs.
FLAKY = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_late(number):
    seen = Path(__file__).with_name(f"seen{{number}}")
    first = not seen.exists()
    seen.touch()
    assert not first, "too late"

def test_prompt():
    assert {prompt}
"""


@pytest.fixture
def cluster_part(tmp_path, monkeypatch, capfd):
    """Runs the part `cluster` on a file of tests: its success, its summary, and the run."""

    def call(text, *, build="", earlier=()):
        (tmp_path / "test_it.py").write_text(text)
        (tmp_path / "test_releases.py").touch()
        (tmp_path / "test_packages.py").touch()
        (tmp_path / "build").write_text(build)
        monkeypatch.setattr(module, "BUILD_PACKAGES", tmp_path / "build")
        monkeypatch.setattr(module, "PACKAGE_TESTS", "test_packages.py")
        monkeypatch.setattr(module, "ROOT", tmp_path)
        monkeypatch.setattr(module, "CLUSTER_TESTS", "test_it.py")
        monkeypatch.setattr(module, "RELEASE_TESTS", "test_releases.py")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setattr(module, "CLUSTERS", 0)
        monkeypatch.setattr(module, "CLUSTERS_ON_SLOW_MEMORY", 0)
        monkeypatch.setattr(module, "TRIALS", 0)
        monkeypatch.setattr(Run, "_is_up", lambda self: True)
        # Other plugins would double the time that pytest takes to start.
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        plugins = ("no:cacheprovider", "xdist.plugin", "tests.support.outcomes")
        run = Run([word for name in plugins for word in ("-p", name)], tmp_path)
        run.outcomes += earlier
        run.cores_are_free.set()
        passed = run.cluster() or run.second_try()
        printed = capfd.readouterr().out
        run.summary()
        return passed, printed if build else capfd.readouterr().out, run

    return call


def test_one_that_needed_its_second_try_is_named(cluster_part):
    passed, said, run = cluster_part(FLAKY.format(count=2, prompt=True))
    assert passed
    assert "tests: 3 passed" in said
    for number in (0, 1):
        assert f"test_it.py::test_late[{number}]: AssertionError: too late" in said
    assert "test_prompt: " not in said
    assert len(run.outcomes) == 3


def test_one_that_fails_twice_fails_the_run(cluster_part):
    passed, said, _ = cluster_part(FLAKY.format(count=1, prompt=False))
    assert not passed
    assert "1 failed, 1 passed" in said


def test_documentation_with_a_warning_fails_the_run(tmp_path, monkeypatch, capfd):
    (tmp_path / "Makefile").write_text("docs:\n\t@echo a warning; exit 2\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    run = Run([], tmp_path)
    run.outcomes.append(Outcome("test_it.py::test_late", "failed", 1.0, "too late"))
    assert not run.docs()
    assert not run.second_try()
    assert "a warning" in capfd.readouterr().out


def test_a_unit_test_has_a_second_try(cluster_part):
    late = Outcome("test_it.py::test_late[0]", result="failed")
    passed, _, run = cluster_part(FLAKY.format(count=2, prompt=True), earlier=[late])
    assert passed
    assert [o.result for o in run.outcomes] == ["passed"] * 3


def test_too_many_second_tries_fail_the_run(cluster_part):
    count = SECOND_TRIES + 1
    passed, said, run = cluster_part(FLAKY.format(count=count, prompt=True))
    assert not passed
    assert f"{count} failed, 1 passed" in said
    assert not run.second_tries


def test_a_file_that_cannot_be_imported_is_not_taken_for_a_late_one(cluster_part):
    passed, _, run = cluster_part("import nothing_of_this_name")
    assert not passed
    assert not run.second_tries


def test_packages_that_cannot_be_built_fail_the_run(cluster_part):
    build = "import sys; sys.exit(f'packaging: {sys.argv[1]} is broken')"
    passed, printed, run = cluster_part("def test_well(): pass", build=build)
    assert not passed
    assert "packaging: trixie is broken" in printed
    assert not run.second_tries


def test_each_unit_test_runs_once(tmp_path, monkeypatch, capsys):
    files = ("unit/test_one", "unit/core/test_two", "property/test_three")
    for number, name in enumerate(files):
        path = tmp_path / "tests" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def test_{number}(): pass")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "COMPUTATIONS", ("tests/property", "tests/unit/core"))
    monkeypatch.setattr(module, "PROCESSES", 0)
    monkeypatch.setattr(module, "COMPUTING", 0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = Run(["-p", "tests.support.outcomes"], tmp_path)
    assert run.unit()
    assert "1 passed" in capsys.readouterr().out
    ran = [outcome.test.partition("::")[0] for outcome in run.outcomes]
    assert sorted(ran) == sorted(f"tests/{name}.py" for name in files)


def test_the_slowest_come_first(tmp_path, capsys):
    run = Run([], tmp_path)
    run.outcomes = [Outcome(f"t{i}", seconds=i) for i in range(12)]
    run.summary()
    rows = re.findall(r"^ +(\d+)\.0 s  t\1$", capsys.readouterr().out, re.MULTILINE)
    assert rows == [str(i) for i in range(11, 1, -1)]


def test_what_did_not_run_stands_in_one_line_for_each_remedy():
    skips = [
        ("a/test_x.py::one", "needs lua5.1"),
        ("a/test_x.py::two", "needs lua5.1"),
        ("a/test_y.py::one", "needs munged"),
        ("b/test_z.py", "sia/traces is missing: profiles, https://x; fetch: contrib/fetch-data"),
        ("b/test_z.py::two", "torch 2.6 has no FSDP2"),
        ("b/test_z.py::three", "needs /dev/full"),
        ("b/test_y.py::one", "torch 2.6 has no FSDP2"),
        ("b/test_s.py", "needs requirements/integrations.txt"),
    ]
    tools, data, frameworks, others = needs.summary(skips)
    assert tools == (
        "3 tests did not run: a/test_x.py (lua5.1) 2, a/test_y.py (munged) 1;"
        " as root: contrib/install-test-tools"
    )
    assert data == (
        "1 tests did not run: b/test_z.py 1; profiles, https://x; fetch: contrib/fetch-data"
    )
    assert frameworks == (
        "1 tests did not run: b/test_s.py (requirements/integrations.txt) 1; make test-integrations"
    )
    assert others == (
        "3 tests did not run for other reasons: needs /dev/full (1); torch 2.6 has no FSDP2 (2)"
    )


def test_a_missing_program_skips_and_a_present_one_is_found():
    assert needs.require("sh").endswith("/sh")
    with pytest.raises(pytest.skip.Exception, match=r"needs no-such-program$"):
        needs.require("no-such-program")


def test_every_program_that_tests_need_can_be_installed():
    text = "".join(
        p.read_text("utf-8") for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__)
    )
    named = set()
    for call in re.findall(r"(?<!published_data\.)\b(?:needs|require)\(([^)]*)\)", text):
        named |= set(re.findall(r'"([^"/_]+)"', call))  # Lua's modules have a "_"
    script = (ROOT / "contrib" / "install-test-tools").read_text("utf-8")
    installed = set(re.findall(r'^    "(\S+) ', script, re.MULTILINE))
    assert {"gcc", "lua5.1", "munged"} <= named
    assert named - installed <= needs.REMEDIES.keys()
