"""The three readers of the directive must say the same: C (under sanitizers), Lua and Python."""

import subprocess
import tempfile
import time
from itertools import zip_longest
from pathlib import Path

from slurm_elastic.core.directive import Directive, DirectiveError
from tests.fuzz.grammar import ROOT, Directives
from tests.fuzz.tally import MOST_CRASHES, Tally

BATCH = 5000
SPANK = ROOT / "plugins" / "spank"
LUA_DIRECTORY = ROOT / "plugins" / "lua"
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

LUA = """
package.path = "%s/?.lua"
local directive = require("slurm_elastic_directive")
for line in io.lines() do
    local text = line:gsub("%%x%%x", function(byte) return string.char(tonumber(byte, 16)) end)
    local d, fault = directive.parse(text)
    if d then
        local gpus, gpu_type = directive.start(d)
        print(string.format("ok\\t%%s\\t%%d\\t%%s", directive.format(d), gpus, gpu_type or ""))
    else
        print(fault.part .. "\\t" .. fault.message)
    end
end
"""


def run(seconds: float, seed: int, *, batch: int = BATCH) -> Tally:
    """Try inputs for so long; a difference ends its batch."""
    tally = Tally()
    supply = Directives(seed)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        reader = build(Path(directory))
        while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
            texts = [supply.one() for _ in range(batch)]
            tally.inputs += batch
            try:
                tally.notes["accepted"] += compare(reader, texts)
            except AssertionError as error:
                tally.crashes.append(f"{error!s:.2000}")
    return tally


def build(directory: Path) -> Path:
    """The C reader as a program."""
    program = directory / "check_directive"
    sources = [SPANK / "check_directive.c", SPANK / "directive.c"]
    subprocess.run(["gcc", "-std=gnu11", *SANITIZERS, "-o", program, *sources], check=True)
    return program


def compare(reader: Path, texts: list[bytes]) -> int:
    """Ask all three; how many were accepted."""
    lines = "".join(text.hex() + "\n" for text in texts)
    in_c = _answers([str(reader)], lines)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA % LUA_DIRECTORY)
        script.flush()
        in_lua = _answers(["lua5.1", script.name], lines)
    accepted = 0
    for text, c, lua in zip_longest(texts, in_c, in_lua):
        python = _python(text.decode("utf-8", "surrogateescape"))
        assert lua == python, f"Lua and Python differ on {text!r}: {lua!r}, {python!r}"
        accepted += python.startswith("ok\t")
        if python.startswith("ok\t"):
            python = "ok"
        assert c == python, f"C and Python differ on {text!r}: {c!r}, {python!r}"
    return accepted


def _answers(command: list[str], lines: str) -> list[str]:
    done = subprocess.run(command, input=lines.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("ascii").splitlines()


def _python(text: str) -> str:
    try:
        directive = Directive.parse(text)
    except DirectiveError as error:
        return f"{error.part}\t{error}"
    gpus, gpu_type = directive.start()
    return f"ok\t{directive}\t{gpus}\t{gpu_type or ''}"
