"""What is written about selastic holds for the selastic that is."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.cli import main
from slurm_elastic.config.documentation import manual, sections
from slurm_elastic.controller.server import socket_server
from slurm_elastic.job.esrun_options import HELP
from slurm_elastic.rpc import answers
from tests.support.needs import needs

TOP = Path(__file__).parents[3]
MAN = TOP / "docs" / "man"
COMPLETION = TOP / "contrib" / "completion" / "selastic.bash"


def _commands():
    group = main.selastic
    return {verb: group.get_command(None, verb) for verb in main.VERBS}


def _long_options(command):
    return {o for p in command.params for o in p.opts if o.startswith("--")} | {"--help"}


def test_every_field_of_the_answers_is_described():
    text = (TOP / "docs" / "cli.md").read_text()
    schemas = [s for s in vars(answers).values() if hasattr(s, "__required_keys__")]
    fields = {f for s in schemas for f in s.__annotations__}
    assert len(fields) > 60
    assert [f for f in sorted(fields) if f"`{f}`" not in text and f'"{f}"' not in text] == []


def test_every_code_and_every_op_is_described():
    text = (TOP / "docs" / "cli.md").read_text()
    source = (TOP / "slurm_elastic" / "controller" / "server" / "requests.py").read_text()
    codes = set(re.findall(r'RequestError\(\s*"(\w+)"', source))
    ops = {*socket_server.QUESTIONS, *socket_server.JOB_COMMANDS, *socket_server.OPERATOR_COMMANDS}
    assert codes >= {"malformed", "refused", "unknown_job", "rate", "version"}
    assert [w for w in sorted(codes | ops) if f"`{w}`" not in text] == []


def test_every_verb_and_option_is_in_the_manual():
    text = (MAN / "selastic.1").read_text().replace("\\-", "-")
    for verb, command in _commands().items():
        assert re.search(rf"^\.BR?I? {verb}\b", text, re.MULTILINE), verb
        for option in _long_options(command) - {"--help", "--all", "--watch"}:
            short = next(o for p in command.params for o in p.opts if option in p.opts)
            assert option in text or f'"{short}' in text or short in text, option


def test_the_manual_of_esrun_knows_its_options():
    text = (MAN / "esrun.1").read_text().replace("\\-", "-")
    listed = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", HELP, re.MULTILINE))
    assert len(listed) >= 6
    assert [o for o in sorted(listed) if o not in text] == []


def test_every_key_of_the_configuration_is_in_the_manual():
    """If this fails: write `config_text.manual()` to docs/man/elastic.toml.5."""
    text = (MAN / "elastic.toml.5").read_text()
    assert text == manual()
    assert all(f"\n.BR {key.name} " in text for _, _, keys in sections() for key in keys)


@needs("groff")
@pytest.mark.parametrize("page", sorted(MAN.iterdir()), ids=lambda p: p.name)
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
    for verb, command in _commands().items():
        assert {o.removesuffix("=") for o in complete(verb, "--")} == _long_options(command)


def test_completion_offers_the_callers_jobs(complete):
    assert complete("explain", "47") == {"4711", "4712_3"}
    assert complete("--config", "x", "hold", "4711", "4712") == {"4712_3"}
    assert complete("st") == {"status"}
