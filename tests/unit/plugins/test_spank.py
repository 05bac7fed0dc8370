"""The SPANK plugin compiled, examined, run under sanitizers; tests/cluster runs it in Slurm."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.directive import Directive, DirectiveError
from tests.fuzz import spank
from tests.support.directives import DIRECTIVES, octets
from tests.support.needs import needs

ROOT = Path(__file__).parents[3]
SPANK = ROOT / "plugins" / "spank"

pytestmark = needs("gcc", "make")


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
    texts = [octets(row) for row in DIRECTIVES["valid"]]
    assert check(*texts) == ["ok"] * len(texts)


def test_invalid(check):
    rows = [row for row in DIRECTIVES["invalid"] if b"\0" not in octets(row)]
    for row, line in zip(rows, check(*map(octets, rows)), strict=True):
        part, message = line.split("\t")
        assert part == row["part"]
        assert message.endswith(": " + row["reason"])


def test_messages_are_pythons(check):
    rows = [row for row in DIRECTIVES["invalid"] if b"\0" not in octets(row)]
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


@needs("lua5.1")
def test_agrees_with_python_and_lua_on_random_directives():
    tally = spank.run(0, 1, batch=3000)
    assert tally.crashes == []
    assert tally.inputs == 3000
    assert tally.notes["accepted"] > 300


def test_plugin_under_sanitizers(tmp_path):
    """The corpus and what a seed makes of it, through every hook and a Slurm that checks."""
    program = tmp_path / "fuzzer"
    names = ["fuzz/fuzz_elastic.c", "fuzz/driver.c", "directive.c"]
    sources = [SPANK / name for name in names]
    command = ["gcc", "-std=gnu11", *spank.SANITIZERS, f"-I{SPANK / 'fuzz'}", "-o", program]
    subprocess.run([*command, *sources], check=True)
    done = subprocess.run(
        [program, "-runs=20000", "-seed=7", SPANK / "fuzz" / "corpus"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    inputs = 20000 + len(list((SPANK / "fuzz" / "corpus").iterdir()))
    assert done.stdout == f"inputs: {inputs}\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The plugin as installed, against Slurm's headers or, without them, the fuzzer's."""
    copy = tmp_path_factory.mktemp("build") / "plugins"
    shutil.copytree(ROOT / "plugins", copy)
    headers = "" if Path("/usr/include/slurm/spank.h").exists() else "CPPFLAGS=-Ifuzz"
    make = ["make", "-s", "-C", copy / "spank", "clean", "all", *headers.split()]
    subprocess.run(make, check=True, env={**os.environ, "CFLAGS": "-O2 -g"})
    return copy / "spank" / "elastic.so"


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_plugin_exports_its_hooks_only(library):
    symbols = output("nm", "-D", "--defined-only", library)
    assert {line.split()[-1] for line in symbols.splitlines()} == {
        *("plugin_name", "plugin_type", "plugin_version", "spank_plugin_version"),
        *("slurm_spank_init", "slurm_spank_init_post_opt"),
    }


def test_plugin_is_hardened(library):
    headers = output("readelf", "-hlW", library)
    dynamic = output("readelf", "-dW", library)
    assert "Type:                              DYN" in headers
    assert "GNU_RELRO" in headers
    assert re.search(r"GNU_STACK .* RW +0x", headers), "an executable stack"
    assert not re.search(r"LOAD .* (RWE|WE) ", headers), "memory to write and to execute"
    assert re.search(r"FLAGS.*NOW", dynamic)
    assert not re.search(r"TEXTREL|RPATH|RUNPATH", dynamic)
    needed = output("nm", "-D", "--undefined-only", library)
    assert "__stack_chk_fail" in needed
    assert {"__snprintf_chk", "__vsnprintf_chk"} <= set(re.findall(r"__\w+_chk", needed))
    assert not re.search(r"\b(strcpy|strcat|sprintf|gets|system|popen|exec\w+)@", needed)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CET is x86-64's")
def test_plugin_marks_where_it_may_be_jumped_to(library):
    notes = output("readelf", "-nW", library.with_name("elastic.o"))
    assert "x86 feature: IBT, SHSTK" in notes
