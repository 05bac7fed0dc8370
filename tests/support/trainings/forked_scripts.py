"""Scripts run in processes that are forked from one that has imported torch.

`python script.py` imports torch for two seconds of CPU before the first line of the script. Where
the start and the end of Python are not what is tested, a fork gives the same output and exit code.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.trainings.training_runs import PROCESSES


def run_forked(
    script: Path | str,
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or its text as `python -c` does, to its end.

    Args:
        script: its path or its text.
        words: arguments of the script.
        cwd: where it runs; default: here.
        env: its environment; default: this one.
        timeout: seconds after which it is killed and the test fails.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        arguments = (script, words, cwd or Path.cwd(), dict(env or os.environ), out)
        process = PROCESSES.Process(target=_run, args=arguments)
        process.start()
        process.join(timeout)
        late = process.exitcode is None
        process.kill()
        process.join()
        stdout, stderr = ((out / name).read_text() for name in ("stdout", "stderr"))
    if late:
        pytest.fail(f"{script} has not ended after {timeout} s\n{stdout}{stderr}")
    return subprocess.CompletedProcess([str(script), *words], process.exitcode, stdout, stderr)


def _run(
    script: Path | str, words: tuple[str, ...], cwd: Path, env: dict[str, str], out: Path
) -> None:
    """Run the script as the main module of this process."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(out / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    # As in a script: data-loader workers are forked from it.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    name, text = "<string>", script
    if isinstance(script, Path):
        name, text = str(script), script.read_text("utf-8")
        sys.path.insert(0, str(script.parent))
    sys.argv = [name if isinstance(script, Path) else "-c", *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if isinstance(script, Path):
        main.__file__ = name
    try:
        exec(compile(text, name, "exec"), vars(main))
    except Exception:  # noqa: BLE001 - multiprocessing would not ask the hook
        # As the interpreter does at the end of a script.
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
