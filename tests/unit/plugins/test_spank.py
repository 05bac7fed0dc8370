"""The SPANK plugin, compiled, examined and run under sanitizers; tests/cluster runs it in Slurm."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from slurm_elastic.core.directive import Directive, DirectiveError
from tests.support.directives import DIRECTIVES, octets
from tests.support.needs import needs

ROOT = Path(__file__).parents[3]
SPANK = ROOT / "plugins" / "spank"
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = needs("gcc", "make")


@pytest.fixture(scope="module")
def sbatch(tmp_path_factory):
    """Return a function that runs fake_sbatch.c and returns the value passed on, or None."""
    program = tmp_path_factory.mktemp("spank") / "fake_sbatch"
    source = Path(__file__).with_name("fake_sbatch.c")
    command = ["gcc", "-std=gnu11", *SANITIZERS, f"-I{SPANK / 'fuzz'}", "-o", program, source]
    subprocess.run(command, check=True)

    def run(*arguments: bytes | str, rc: int = 0, **environment: bytes | str):
        done = subprocess.run(
            [program, *arguments], capture_output=True, check=False, env=environment
        )
        assert done.returncode == rc, done.stderr.decode()
        if rc:
            return done.stderr.decode("ascii")
        lines = done.stdout.decode("ascii").splitlines()
        values = [line.split(" ")[1] for line in lines if line.startswith("ELASTIC ")]
        return bytes.fromhex(values[0]) if values else None

    return run


def test_valid_directives_are_passed_on_unchanged(sbatch):
    for row in DIRECTIVES["valid"]:
        text = octets(row)
        assert sbatch(b"--elastic=" + text) == text
        assert sbatch(SLURM_ELASTIC=text) == text


def test_invalid_directives_are_passed_on_and_stay_invalid(sbatch):
    for row in DIRECTIVES["invalid"]:
        text = octets(row)
        if b"\0" in text:
            continue
        passed = sbatch(b"--elastic=" + text)
        with pytest.raises(DirectiveError) as caught:
            Directive.parse(passed.decode("ascii"))
        if len(text) < 512 and all(0x20 <= byte <= 0x7E for byte in text):
            assert passed == text
            assert caught.value.part == row["part"]


def test_bytes_that_are_not_printable_become_question_marks(sbatch):
    assert sbatch("--elastic=2\u201316") == b"2???16"
    assert sbatch("--elastic=2-16\x1b[31m\n\x7f \t") == b"2-16?[31m?? ?"
    assert sbatch(SLURM_ELASTIC="4-2\x1b[31m") == b"4-2?[31m"


def test_long_values_are_cut_but_stay_too_long(sbatch):
    assert sbatch(f"--elastic=2-16,types={600 * 'a'}") == b"2-16,types=" + 500 * b"a"


def test_command_line_beats_environment_beats_script(sbatch):
    assert sbatch() is None
    assert sbatch("script=3") == b"3"
    assert sbatch("script=3", SLURM_ELASTIC="2") == b"2"
    assert sbatch("script=3", SLURM_ELASTIC="") == b"3"
    assert sbatch("script=3", "--elastic=1", SLURM_ELASTIC="2") == b"1"
    assert sbatch("--elastic=1", "--elastic=2") == b"2"
    assert sbatch("--elastic=", SLURM_ELASTIC="2") == b""
    assert sbatch("script=3", "script=3") == b"3"


def test_two_values_in_the_script_are_refused(sbatch):
    refusal = "elastic: --elastic=3?: differs from --elastic=2 given before; keep one\n"
    assert sbatch("script=2", "script=3\n", rc=255) == refusal


def test_help_lists_the_keys_of_the_directive():
    source = (SPANK / "elastic.c").read_text("utf-8")
    usage = source[source.index("; keys: ") : source.index(".has_arg")]
    keys = re.findall(r"([a-z-]+)=[^ =]*[,\"]", usage)
    with pytest.raises(DirectiveError) as caught:
        Directive.parse("2,key=")
    assert caught.value.reason.endswith("known keys: " + ", ".join(keys))


def test_plugin_under_sanitizers(tmp_path):
    """Run the corpus and mutations of it through every hook; fuzz_elastic.c checks each."""
    program = tmp_path / "fuzzer"
    sources = [SPANK / "fuzz" / name for name in ("fuzz_elastic.c", "driver.c")]
    command = ["gcc", "-std=gnu11", *SANITIZERS, f"-I{SPANK / 'fuzz'}", "-o", program]
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
    """Build the plugin as installed, with Slurm's headers or else those of the fuzzer."""
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


def test_plugin_reports_the_release_that_loads_it(library, tmp_path):
    """Slurm rejects a plugin of another release; where it was not tried, it adds no option."""
    program = tmp_path / "fake_slurm"
    source = Path(__file__).with_name("fake_slurm.c")
    command = ["gcc", "-std=gnu11", f"-I{SPANK / 'fuzz'}", "-rdynamic", "-o", program, source]
    subprocess.run([*command, "-ldl"], check=True)
    releases = {
        38: "22.05.0 0", 39: "23.02.0 0", 40: "23.11.0 1", 41: "24.05.0 1", 42: "24.11.0 1",
        43: "25.05.0 1", 44: "25.11.0 1", 45: "26.05.0 1", 46: "26.11.0 0", 47: "27.05.0 0",
        0: "0.00.0 0",
    }  # fmt: skip
    assert {n: output(program, library, str(n)).strip() for n in releases} == releases


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
    assert not re.search(r"\b(strcpy|strcat|v?s?n?printf|gets|system|popen|exec\w+)@", needed)
    make = ["make", "-C", library.parent, "--dry-run", "--always-make", "elastic.o"]
    assert re.search(r" -D_FORTIFY_SOURCE=[23] ", output(*make))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="CET is x86-64's")
def test_plugin_marks_where_it_may_be_jumped_to(library):
    notes = output("readelf", "-nW", library.with_name("elastic.o"))
    assert "x86 feature: IBT, SHSTK" in notes
