"""elastic.toml: each error is one line with its place and remedy."""

import doctest

import pytest

from slurm_elastic.config import key, schema
from slurm_elastic.config.schema import ConfigError, load, parse

PREFIX = '[controller]\nmode = "act"\n'


def test_examples_in_docstrings():
    assert doctest.testmod(schema).failed == doctest.testmod(key).failed == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[controller]\n\npolicy = "sai"', 'f.toml:3: policy "sai" is unknown; known: fair, sia'),
        ("[contoller]", "f.toml:1: section [contoller] is unknown; known: controller, api"),
        ('policy = "fair"', "f.toml:1: policy is outside its section: put it in [controller]"),
        (PREFIX + "intervall = 3", "f.toml:3: intervall is unknown in [controller]; known: mode"),
        (PREFIX + "interval_s = 0", "f.toml:3: interval_s = 0 is invalid: expected 1 to 3600"),
        (PREFIX + 'interval_s = "30"', "f.toml:3: interval_s = '30' is invalid: expected a number"),
        (PREFIX + "interval_s = nan", "f.toml:3: interval_s = nan is invalid: expected 1 to 3600"),
        (
            PREFIX + 'operators = "root"',
            "f.toml:3: operators = 'root' is invalid: expected a list of text; write",
        ),
        (
            "[speedup]\ntypes = { a100 = -1 }",
            "f.toml:2: types of a100 = -1 is invalid: expected 1e-06",
        ),
        (
            "[speedup]\ntypes = 3",
            "f.toml:2: types = 3 is invalid: expected a table; write e.g. { a100 = 2 }",
        ),
        (
            "[topology]\nspeeds = { rack = 0 }",
            "f.toml:2: speeds of rack = 0 is invalid: expected 1e-06",
        ),
        (
            "[topology]\nspeeds = { leaf = 9 }",
            'f.toml:2: speeds "leaf" is unknown; known: domain, ',
        ),
        (
            "[topology]\nspeeds = 100",
            "f.toml:2: speeds = 100 is invalid: expected a table; write e.g. { domain = 2 }",
        ),
        (
            '[topology]\nuplinks = { "g[1-4]" = -40.0 }',
            "f.toml:2: uplinks of g[1-4] = -40 is invalid",
        ),
        (
            "[topology]\ndomains = { a100 = 0 }",
            "f.toml:2: domains of a100 = 0 is invalid: expected 1 to",
        ),
        (
            "[topology]\ndomains = { a100 = 2.5 }",
            "f.toml:2: domains of a100 = 2.5 is invalid: expected a whole number",
        ),
        (
            '[neighbours]\nmode = "off"\nshare_gpus = "act"',
            'f.toml:3: share_gpus "act" needs the speeds of pairs, and mode "off" measures none;',
        ),
        ("controller = 3", "f.toml:1: controller must be a section; write [controller]"),
        ("[sia]\nshare = 1", "f.toml:2: share = 1 is invalid: expected true or false"),
        ('[sia]\nartifact_rules = ["x"]', 'f.toml:2: artifact_rules "x" is unknown; known: batch'),
        ("[controller", "f.toml: Expected"),
    ],
)
def test_errors(text, line):
    with pytest.raises(ConfigError) as caught:
        parse(text, name="f.toml", policies=("fair", "sia"))
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_files(tmp_path, content):
    path = tmp_path / "elastic.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="name another file with --config"):
        load(path)
