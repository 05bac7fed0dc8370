"""Input files of `selastic`: traces, workloads, profiles, tables, configurations."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.config import schema
from slurm_elastic.models.pipedream import profile_reader
from slurm_elastic.profiler import profile_file
from slurm_elastic.simulator.gangs import gang_files
from slurm_elastic.simulator.truth import rack_network, restart_costs
from slurm_elastic.simulator.workloads import accounting_trace, workload
from tests.fuzz import checked_log, texts
from tests.fuzz.tally import Tally, drive

_DATA = Path(__file__).parents[1] / "data"


class Reader(NamedTuple):
    """A reader of files; its seeds are whole files."""

    read: Callable[[Path], Any]
    refuses: tuple[type[Exception], ...]
    name: str
    seeds: tuple[bytes, ...]


_READERS = (
    Reader(schema.load, (schema.ConfigError,), "elastic.toml", (texts._TOML.encode(),)),
    Reader(accounting_trace.read, (accounting_trace.SacctError,), "sacct.txt", ((_DATA / "sacct-week.txt").read_bytes()[:3000],
        b'{"jobs":[{"job_id":1,"user":"a","time":{"submission":1,"start":2,"end":9},"state":'
        b'{"current":["COMPLETED"]},"tres":{"allocated":[{"type":"gres","name":"gpu","count":2}]}}]}')),
    Reader(workload.read, (workload.WorkloadError,), "w.csv",
        ((",".join(workload.COLUMNS) + ",category\nj1,0,bert,1,8,rigid\nj2,9,vgg,2,64,\n").encode(),)),
    Reader(profile_file.read, (profile_file.ProfileFileError,), "p.json",
        tuple(p.read_bytes() for p in sorted((_DATA / "profiles").glob("*.json"))[:2])),
    Reader(profile_reader.read, (profile_reader.LayerProfileError,), "layers.json",
        (b'{"layers":[{"name":"a","forward_s":1,"backward_s":2,"activation_bytes":3,'
         b'"parameter_bytes":4}],"edges":[]}',
         b"node1 -- Conv2d -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=3.0,"
         b" parameter_size=4.0\nnode2 -- Fc -- forward_compute_time=1.0, backward_compute_time=2.0,"
         b" activation_size=3.0, parameter_size=4.0\n\tnode1 -- node2\n")),
    Reader(gang_files.read_workload, (workload.WorkloadError,), "gangs.csv",
        (b"job_id,arrival_time,model,total_iterations,time_per_iteration,max_parallelism\n"
         b"1,0,vgg,100,0.5,4\n2,3.5,vgg,10,0.25,8\n",)),
    Reader(gang_files.read_slowdowns, (workload.WorkloadError,), "slow.csv",
        (b"model,gpus,racks,machines,slots,compute_us,exposed_comm_us,s\n"
         b"vgg,4,1,1,4,100,25,\nvgg,8,1,2,4,,,0.5\n",)),
    Reader(rack_network.read_gradients, (workload.WorkloadError,), "gradients.csv",
        (b"application,bytes\nbert,1e9\nvgg,5e8\n",)),
    Reader(restart_costs.read, (restart_costs.RestartCostError,), "restarts.json",
        (b'[{"application":"a","checkpoint_s":1,"slurm_s":3,"start_s":4}]',
         b"application,checkpoint_s,slurm_s,start_s\nbert,1,3,4\n")),
)  # fmt: skip
_SLOWEST_S = 5.0
_folder: tempfile.TemporaryDirectory[str] | None = None


def one(rng: random.Random) -> str:
    """Read one file with one reader."""
    global _folder  # noqa: PLW0603 - one a process
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="fuzz-")
    reader = rng.choice(_READERS)
    path = Path(_folder.name) / reader.name
    texts.file(rng, path, rng.choice(reader.seeds))
    return texts.tried(
        reader.name,
        lambda: reader.read(path),
        reader.refuses,
        size=path.stat().st_size,
        slowest_s=_SLOWEST_S,
        ours=True,
    )


def run(seconds: float, seed: int) -> Tally:
    """Run for some seconds; see `tally.drive`."""
    checked_log.quiet()
    return drive(one, seconds=seconds, seed=seed)
