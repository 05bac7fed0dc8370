"""Commands selastic and selasticd, as pip installs them: one line where they cannot run.

Imports nothing of the extra `controller` before it is known to be there, and runs on the Python of
jobs.
"""

from __future__ import annotations

import sys

from slurm_elastic.job.site_command import missing_packages, run_later_command

#: First release of Python that selastic and selasticd run on.
OLDEST_PYTHON = (3, 11)


def selastic() -> None:
    """Run selastic, that of the site if this environment has only the library."""
    if problem("selastic"):
        run_later_command("selastic")
    _end_if_unusable("selastic")
    from slurm_elastic.cli.main import main  # noqa: PLC0415

    main()


def selasticd() -> None:
    """Run selasticd."""
    _end_if_unusable("selasticd")
    from slurm_elastic.cli.reason_text import logged  # noqa: PLC0415
    from slurm_elastic.controller.daemon import main  # noqa: PLC0415

    main(obj=logged)


def problem(name: str) -> str:
    """Return in one line why the command cannot run here, and the remedy; "" if it can."""
    version = sys.version_info[:3]
    if version < OLDEST_PYTHON:
        oldest, present = (".".join(map(str, v)) for v in (OLDEST_PYTHON, version))
        return (
            f"{name}: Python {present} is invalid: expected {oldest} or newer;"
            f" install slurm-elastic[controller] with a newer one, or run the site's {name}"
        )
    missing = missing_packages()
    if missing:
        return (
            f"{name}: not installed: {', '.join(missing)} (without the extra `controller` there are"
            f" only the parts for jobs): {sys.executable} -m pip install"
            f" 'slurm-elastic[controller]', or run the site's {name}"
        )
    return ""


def _end_if_unusable(name: str) -> None:
    text = problem(name)
    if text:
        sys.stderr.write(f"{text}\n")
        sys.exit(1)
