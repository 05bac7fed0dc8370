"""docs/cli.md describes every field, code and request."""

import re
from pathlib import Path

from slurm_elastic.controller.server import socket_server
from slurm_elastic.rpc import answers

TOP = Path(__file__).parents[3]


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
