"""Runs recorded trainings on one rank without esrun, one after the other.

    python -m tests.integrations.undisturbed FOLDER MODULE[=OPTIONS]... -- OPTIONS-OF-ALL

Each writes its record in a folder of its own name. Frameworks import each other's parts: each
training is a fork of one process, which imports its module after the forks of the modules before.
"""

import importlib
import os
import sys
import traceback
from pathlib import Path

FIRST_PORT = 29500


def train(module: str, out: Path, port: int, options: list[str]) -> None:
    """Run one training in this process, and end it."""
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "USE_LIBUV": 0}
    os.environ.update({name: str(value) for name, value in alone.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        importlib.import_module(module).main(["--out", str(out), *options])
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does at the end of a script
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    folder, *words = sys.argv[1:]
    at = words.index("--")
    for port, word in enumerate(words[:at], FIRST_PORT):
        name, _, own = word.partition("=")
        module = f"{__package__}.{name}"
        options = [*words[at + 1 :], *own.split()]
        sys.argv = [name, *options]
        importlib.import_module(module)
        pid = os.fork()
        if pid == 0:
            train(module, Path(folder, name), port, options)
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{name} has failed")


if __name__ == "__main__":
    main()
