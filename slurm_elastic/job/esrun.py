"""esrun: from the command line to running ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.job.esrun_options import HELP, Options, parse
from slurm_elastic.job.launch import RankLaunch, hold_signals, say
from slurm_elastic.job.slurm_env import AllocationError

#: Slurm needs about so long to start the ranks.
_AHEAD_S = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run esrun; the exit code is the program's."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.show:
            return _show(options.show)
        if options.local is not None or "SLURM_JOB_ID" not in os.environ:
            return _without_slurm(options)
        return _in_job(options, os.environ)
    except SlurmElasticError as error:
        say(str(error))
        return 2
    except FileNotFoundError as error:
        say(f"{error.filename}: not found")
        return 127


def _in_job(options: Options, env: Mapping[str, str]) -> int:
    if int(env.get("SLURM_STEP_NUM_TASKS", "1") or 1) > 1 and "SLURM_STEP_ID" in env:
        raise AllocationError("started by srun in several tasks: start esrun itself, without srun")
    launch = RankLaunch(options, env)
    launch.begin_probe()
    if options.dry_run:
        import shlex  # noqa: PLC0415 - see below

        launch.settle()
        sys.stdout.write(shlex.join(launch.command()) + "\n")
        return 0
    hold_signals()
    if options.checkpoint:
        # What checkpoints there are has to be known before the ranks can read them.
        from slurm_elastic.job.supervisor import Supervisor  # noqa: PLC0415

        launch.settle()
        return Supervisor(launch).run()
    launch.settle()
    child = launch.start()
    child.ends_within(_AHEAD_S)
    # Loading this takes 60 ms of a core that Slurm and the ranks need before.
    from slurm_elastic.job.supervisor import Supervisor  # noqa: PLC0415

    return Supervisor(launch, child).run()


def _without_slurm(options: Options) -> int:
    from slurm_elastic.job import single_machine  # noqa: PLC0415 - see above

    return single_machine.run(options.program, options.local or 1)


def _show(what: str) -> int:
    from slurm_elastic import __version__  # noqa: PLC0415 - see above

    sys.stdout.write(HELP if what == "h" else f"esrun {__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
