"""Command line of the demo: `python -m contrib.demo`, as `make demo` calls it."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from contrib.demo.demo_cluster import DemoError
from contrib.demo.runner import DemoOptions, run_demo

_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code: 0 if all checks hold, 1 if not or if it failed."""
    options = _options(arguments)
    begun = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals without arrows
    try:
        all_hold = run_demo(options)
    except DemoError as error:
        if str(error):
            print(f"demo: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # as of `make demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"in all {time.monotonic() - begun:.0f} s")
    return 0 if all_hold else 1


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _options(arguments: list[str] | None) -> DemoOptions:
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=…",
        description="Run elastic jobs on a real Slurm cluster in containers, and check from "
        "sacct and the jobs' own logs that nothing was lost.",
        epilog="Exit code: 0 if every check holds, 1 if not, 3 if Docker is missing.",
    )
    parser.add_argument("--name", default="demo", help="name of the cluster (%(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        help="folder for picture and logs (%(default)s)",
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--short", action="store_true", help="one job that grows, nothing else")
    parser.add_argument(
        "--break",
        dest="sabotage",
        choices=("skip-sample", "kill-job"),
        help="run the short scenario and damage a job, to see that the checks fail",
    )
    given = parser.parse_args(arguments)
    return DemoOptions(
        name=given.name,
        out=given.out,
        keep=given.keep,
        short=given.short or given.sabotage is not None,
        sabotage=given.sabotage or "",
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # so that the cluster is removed then as well
    sys.exit(main())
