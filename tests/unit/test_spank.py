"""The SPANK plugin's reader of the directive, compiled and run; the plugin itself runs in
tests/cluster."""

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.directive import Directive, DirectiveError

ROOT = Path(__file__).parents[2]
EXAMPLES = tomllib.loads((ROOT / "tests" / "data" / "directives.toml").read_text("utf-8"))

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def octets(row: dict[str, Any]) -> bytes:
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    if "repeat" in row:
        return (row["repeat"][0] * row["repeat"][1]).encode()
    return row["text"].encode()


def answer(text: str) -> str:
    """What check_directive should print."""
    try:
        Directive.parse(text)
    except DirectiveError as error:
        return f"{error.part}\t{error}"
    return "ok"


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """Runs the C reader on texts; any memory error ends it."""
    program = tmp_path_factory.mktemp("spank") / "check_directive"
    sources = [ROOT / "plugins" / "spank" / name for name in ("check_directive.c", "directive.c")]
    warnings = ["-std=gnu11", "-Wall", "-Wextra", "-Werror"]
    sanitizers = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *warnings, *sanitizers, "-o", program, *sources], check=True)

    def run(*texts: bytes) -> list[str]:
        done = subprocess.run([program, *texts], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode("ascii").splitlines()

    return run


def test_valid(check):
    texts = [octets(row) for row in EXAMPLES["valid"]]
    assert check(*texts) == ["ok"] * len(texts)


def test_invalid(check):
    rows = [row for row in EXAMPLES["invalid"] if b"\0" not in octets(row)]
    for row, line in zip(rows, check(*map(octets, rows)), strict=True):
        part, message = line.split("\t")
        assert part == row["part"]
        assert message.endswith(": " + row["reason"])


def test_messages_are_pythons(check):
    rows = [row for row in EXAMPLES["invalid"] if b"\0" not in octets(row)]
    texts = [octets(row) for row in rows]
    assert check(*texts) == [answer(text.decode("utf-8", "surrogateescape")) for text in texts]


KEYS = ["types=", "batch=", "parallel=", "freeze=", "max-penalty=", "notice=", "unit="]
VALUES = ["a100", "v100", "a100:2", "mig", "1g.5gb", "data", "auto", "off", "0.5%", "100%", "é"]
NUMBERS = ["2", "16", "0", "4-8", "8-4", "99999999999"]
SIGNS = [*"-,=:/.% \t", ",,"]
PIECES = st.sampled_from(KEYS + VALUES + NUMBERS + SIGNS)


@settings(max_examples=60)
@given(st.lists(st.lists(PIECES, max_size=9).map(lambda pieces: "2-16," + "".join(pieces))))
def test_agrees_with_python(check, texts):
    assert check(*(text.encode() for text in texts)) == [answer(text) for text in texts]


@given(st.lists(st.binary(max_size=300).filter(lambda data: b"\0" not in data), min_size=20))
@settings(max_examples=30)
def test_survives_any_bytes(check, texts):
    lines = check(*texts)
    assert lines == [answer(text.decode("utf-8", "surrogateescape")) for text in texts]


@pytest.mark.skipif(
    not Path("/usr/include/slurm/spank.h").exists(), reason="Slurm's headers are not installed"
)
def test_plugin_exports_its_hooks_only(tmp_path):
    shutil.copytree(ROOT / "plugins", tmp_path / "plugins")
    subprocess.run(["make", "-s", "-C", tmp_path / "plugins" / "spank", "clean", "all"], check=True)
    library = tmp_path / "plugins" / "spank" / "elastic.so"
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        *("plugin_name", "plugin_type", "plugin_version", "spank_plugin_version"),
        *("slurm_spank_init", "slurm_spank_init_post_opt"),
    }
