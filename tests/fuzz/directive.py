"""Directives: Lua and Python must accept, refuse and read the same texts."""

import subprocess
import tempfile
import time
from itertools import zip_longest

from slurm_elastic.core.directive import Directive, DirectiveError
from tests.fuzz.grammar import ROOT, Directives
from tests.fuzz.tally import MOST_CRASHES, Tally

BATCH = 5000
LUA_DIRECTORY = ROOT / "plugins" / "lua"

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
    while not tally.inputs or (time.monotonic() < end and len(tally.crashes) < MOST_CRASHES):
        texts = [supply.one() for _ in range(batch)]
        tally.inputs += batch
        try:
            tally.notes["accepted"] += compare(texts)
        except AssertionError as error:
            tally.crashes.append(f"{error!s:.2000}")
    return tally


def compare(texts: list[bytes]) -> int:
    """Compare the answers of Lua and Python; return how many texts were accepted."""
    accepted = 0
    for text, in_lua in zip_longest(texts, _lua(texts)):
        in_python = _python(text.decode("utf-8", "surrogateescape"))
        assert in_lua == in_python, f"{text!r}: Lua {in_lua!r}, Python {in_python!r}"
        accepted += in_python.startswith("ok\t")
    return accepted


def _lua(texts: list[bytes]) -> list[str]:
    lines = "".join(text.hex() + "\n" for text in texts)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA % LUA_DIRECTORY)
        script.flush()
        command = ["lua5.1", script.name]
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
