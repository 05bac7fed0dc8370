"""The command esrun: from its arguments to running ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.job.esrun_options import HELP, Options, parse
from slurm_elastic.job.launch import RankLaunch, hold_signals, log_line
from slurm_elastic.job.slurm_env import AllocationError, is_started_by_srun, tasks_of_step

#: Seconds that Slurm needs to start the ranks.
_AHEAD_S = 0.25


def main(arguments: Sequence[str] | None = None) -> int:
    """Run esrun and return the exit code of the program."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
        if options.show:
            return _show(options.show)
        if options.local is not None or "SLURM_JOB_ID" not in os.environ:
            return _without_slurm(options)
        return _in_job(options, os.environ)
    except SlurmElasticError as error:
        log_line(str(error))
        return 2
    except FileNotFoundError as error:
        log_line(f"{error.filename}: not found")
        return 127


def _in_job(options: Options, env: Mapping[str, str]) -> int:
    if tasks_of_step(env) > 1:
        raise AllocationError("srun started several tasks of esrun: expected one; omit srun")
    if is_started_by_srun(env):
        raise AllocationError(
            "srun started esrun, which fails as soon as the job has several GPUs: omit srun"
        )
    launch = RankLaunch(options, env)
    if not options.dry_run:
        launch.lock_job()
    launch.begin_queries()
    if options.dry_run:
        import shlex  # noqa: PLC0415 - see below

        launch.settle()
        sys.stdout.write(shlex.join(launch.command()) + "\n")
        return 0
    hold_signals()
    if options.checkpoint:
        # The existing checkpoints must be listed before the ranks can read them.
        from slurm_elastic.job.supervisor import Supervisor  # noqa: PLC0415

        launch.settle()
        return Supervisor(launch).run()
    launch.settle()
    child = launch.start()
    child.ends_within(_AHEAD_S)
    # Imported late: it takes 60 ms of a core, which Slurm and the ranks need first.
    from slurm_elastic.job.supervisor import Supervisor  # noqa: PLC0415

    return Supervisor(launch, child).run()


def _without_slurm(options: Options) -> int:
    if options.dry_run:
        raise AllocationError("-n without a job is invalid: there is no srun command; use salloc")
    from slurm_elastic.job import single_machine  # noqa: PLC0415 - see above

    return single_machine.run(
        options.program,
        options.local or 1,
        gpus=options.gpus,
        micro_batches=options.micro_batches,
    )


def _show(option: str) -> int:
    from slurm_elastic import __version__  # noqa: PLC0415 - see above

    sys.stdout.write(HELP if option == "h" else f"esrun {__version__}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
