"""Valid and invalid directives (tests/data), and their readers in Lua and in Python."""

import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slurm_elastic.core.directive import Directive, DirectiveError

DIRECTIVES: dict[str, list[dict[str, Any]]] = tomllib.loads(
    (Path(__file__).parents[1] / "data" / "directives.toml").read_text("utf-8")
)

#: A program that writes the lines of `read_in_python`.
_LUA_READER = """
package.path = "@/?.lua"
local directive = require("slurm_elastic_directive")
for line in io.lines() do
    local text = line:gsub("%x%x", function(byte) return string.char(tonumber(byte, 16)) end)
    local d, fault = directive.parse(text)
    if d then
        local gpus, gpu_type = directive.start(d)
        print(string.format("ok\\t%s\\t%d\\t%s", directive.format(d), gpus, gpu_type or ""))
    else
        print(fault.part .. "\\t" .. fault.message)
    end
end
""".replace("@", str(Path(__file__).parents[2] / "plugins" / "lua"))


def octets(row: dict[str, Any]) -> bytes:
    """Return the directive of a row, as a user would type it."""
    if "hex" in row:
        return bytes.fromhex(row["hex"])
    if "repeat" in row:
        return (row["repeat"][0] * row["repeat"][1]).encode()
    return bytes(row["text"], "utf-8")


def read_in_lua(texts: Iterable[bytes]) -> list[str]:
    """Return the Lua module's reading of each text, one line each: see `read_in_python`."""
    lines = "".join(text.hex() + "\n" for text in texts)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_LUA_READER)
        script.flush()
        command = ["lua5.1", script.name]
        done = subprocess.run(command, input=lines.encode(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8", "surrogateescape").splitlines()


def read_in_python(text: str) -> str:
    """Return `ok`, directive, GPUs and GPU type at its start, or part and message, by tabs."""
    try:
        directive = Directive.parse(text)
    except DirectiveError as error:
        return f"{error.part}\t{error}"
    gpus, gpu_type = directive.start()
    return f"ok\t{directive}\t{gpus}\t{gpu_type or ''}"
