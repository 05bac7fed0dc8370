"""Completion, manual pages and the example configuration follow the definitions."""

import os
import re
import subprocess

import pytest

from contrib.generate import ROOT, documents
from contrib.generate.definitions import options, verbs
from slurm_elastic.cli import main
from slurm_elastic.config.documentation import sections
from slurm_elastic.job.esrun_options import HELP
from tests.support.needs import needs

MAN = ROOT / "docs" / "man"
COMPLETION = ROOT / "contrib" / "completion" / "selastic.bash"


def _long_options(command):
    return {name for o in options(command) for name in o.opts if name.startswith("--")}


@pytest.mark.parametrize("path", sorted(documents()), ids=lambda p: p.name)
def test_generated_documents_are_current(path):
    """If this fails: `make generate`."""
    assert path.read_text() == documents()[path]


def test_every_verb_and_option_is_in_the_manual():
    text = (MAN / "selastic.1").read_text().replace("\\-", "-")
    assert len(dict(verbs())) > 20
    for verb, command in verbs():
        assert re.search(rf"^\\fB{verb}\\fR", text, re.MULTILINE), verb
        assert [o for o in _long_options(command) if f"\\fB{o}\\fR" not in text] == []


def test_every_option_of_esrun_is_in_its_manual():
    text = (MAN / "esrun.1").read_text().replace("\\-", "-")
    listed = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", HELP, re.MULTILINE))
    assert len(listed) >= 6
    assert [o for o in sorted(listed) if f"\\fB{o}\\fR" not in text] == []


def test_every_key_of_the_configuration_is_in_its_manual():
    text = (MAN / "elastic.toml.5").read_text()
    assert all(f"\n\\fB{key.name}\\fR" in text for _, _, keys in sections() for key in keys)


@needs("groff")
@pytest.mark.parametrize("page", sorted(MAN.glob("*.[158]")), ids=lambda p: p.name)
def test_manual_pages_are_well_formed(page):
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", str(page)], capture_output=True, check=True
    )
    assert done.stderr == b""


@pytest.fixture
def complete(tmp_path):
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\nprintf '4711\\n4712_3\\n'\n")
    squeue.chmod(0o755)

    def run(*words):
        script = (
            f'source {COMPLETION}; COMP_WORDS=(selastic "$@"); COMP_CWORD=$#; _selastic;'
            ' printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script, "-", *words], capture_output=True, text=True, check=True,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )  # fmt: skip
        return set(done.stdout.split())

    return run


def test_completion_knows_every_verb_and_option(complete):
    assert set(main.VERBS) <= complete("")
    for verb, command in verbs():
        assert complete(*verb.split(), "--") == _long_options(command) | {"--help"}


def test_completion_offers_the_callers_jobs(complete):
    assert complete("explain", "47") == {"4711", "4712_3"}
    assert complete("--config", "x", "hold", "4711", "4712") == {"4712_3"}
    assert complete("st") == {"status"}


def test_completion_offers_the_values_of_options(complete):
    assert complete("simulate", "--clock", "") == {"round", "event"}
    assert complete("workload", "") == {"generate", "from-sacct", "profiles"}
    assert complete("workload", "generate", "--arrivals", "d") == {"diurnal"}
    assert complete("status", "--format", "") == set()
    assert complete("status", "--watch", "--a") == {"--all"}
