"""`python -m contrib.demo`, better known as `make demo`."""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from contrib.demo.errors import DemoError
from contrib.demo.performance import Options, perform

_INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Play the demo; 0 if the verdict is good, 1 if not or if it cannot be played."""
    options = _options(arguments)
    begun = time.monotonic()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that knows no arrows
    try:
        good = perform(options)
    except DemoError as error:
        if str(error):
            print(f"demo: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # nobody reads on: `make demo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    print(f"in all {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _options(arguments: list[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="make demo ARGS=…",
        description="Watch elastic jobs on a real Slurm cluster in containers, and have it proven "
        "from sacct and the jobs' own logs that nothing was lost.",
        epilog="Exit code: 0 if every check holds, 1 if not, 3 if Docker cannot be had.",
    )
    parser.add_argument("--name", default="demo", help="of the cluster (%(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="where the picture goes (%(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the cluster up")
    parser.add_argument("--short", action="store_true", help="one job that grows, nothing else")
    parser.add_argument(
        "--break",
        dest="sabotage",
        choices=("skip-sample", "kill-job"),
        help="play the short scene and break it, to see that the verdict notices",
    )
    given = parser.parse_args(arguments)
    return Options(
        name=given.name,
        out=given.out,
        keep=given.keep,
        short=given.short or given.sabotage is not None,
        sabotage=given.sabotage or "",
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)  # so that the cluster is taken down then, too
    sys.exit(main())
