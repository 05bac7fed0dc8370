"""Input files of `selastic`: traces, workloads, profiles, tables, configurations."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.config import schema
from slurm_elastic.models.pipedream import profile_reader
from slurm_elastic.models.spatial import network_file
from slurm_elastic.profiler import profile_file
from slurm_elastic.simulator.gangs import gang_files
from slurm_elastic.simulator.truth import neighbour_slowdown, rack_network, restart_costs
from slurm_elastic.simulator.workloads import (
    accounting_trace,
    application_profiles,
    builtin_profiles,
    curve_jobs,
    scaling_curves,
    workload,
)
from tests.fuzz import checked_log, texts
from tests.fuzz.tally import Tally, drive

_DATA = Path(__file__).parents[1] / "data"


class Reader(NamedTuple):
    """A reader of files; its seeds are whole files."""

    read: Callable[[Path], Any]
    refuses: tuple[type[Exception], ...]
    name: str
    seeds: tuple[bytes, ...]


def _past(path: Path) -> None:
    """Read an accounting file or a trace, make jobs of it, and read what is then written."""
    past = accounting_trace.read(path)
    jobs = curve_jobs.from_accounting(past, scaling_curves.rules("amdahl:0.9"))
    types = sorted({run.gpu_type for job in past.jobs for run in job.runs if run.gpu_type})
    curve_jobs.build("x", jobs, types or ["gpu"])
    written = path.with_name("written.csv")
    with written.open("w", encoding="utf-8") as stream:
        curve_jobs.write(jobs, stream)
    assert len(curve_jobs.read(written)[1]) == len(jobs)


def _profiles(path: Path) -> None:
    """Read a set of profiles, of which one table is the file."""
    folder = path.with_name("set")
    if not folder.is_dir():
        builtin_profiles.write(folder)
    (folder / "resnet18" / "placements-a100.csv").write_bytes(path.read_bytes())
    application_profiles.read(folder, ["resnet18"], ["a100"])


def _table() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        builtin_profiles.write(Path(folder))
        return (Path(folder) / "resnet18" / "placements-a100.csv").read_bytes()[:2000]


_TRACES = (
    b"job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    b"1,u,v,4,1,1,FAILED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0\n"
    b"2,u,v,8,1,1,COMPLETED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,,117.0,32\n",
    b"name,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    b"a,1,460,,LS,Running,427061,12902960,427061\nb,8,1000,V100M16|V100M32,BE,Failed,1.0,900.0,2\n",
    b"job_name,organization,gpu_model,gpu_request,worker_num,submit_time,duration,job_type\n"
    b"437260,57,A100-SXM4-80GB,1,16,9589663,41060,Spot\n",
    b"a,worker,2.0,Terminated,1739162.0,1739262.0,600.0,29.3,50.0,MISC\nb,ps,1.0,Waiting,,,600.0,,,\n",
    b"id_job,id_user,nodes_alloc,timelimit,time_submit,time_start,time_end,state,tres_alloc\n"
    b'88,5,2,1440,1610000000,1610000060,1610003660,3,"1=40,2=170000,1002=4"\n',
    b"LM\tpython3 main.py\tlm\t--steps\t1\t134583\t1\tgns\t1\t-1.0\t1418\t0\n"
    b"ResNet-18\tpython3 main.py\tr\t-n\t1\t143450\t4\tstatic\t1\t-1.0\t3338\t55\n",
    b"job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,0,606,vgg19,164,30\n",
    b"; UnixStartTime: 1000000\n1 5094 -1 12072 16 -1 -1 -1 -1 -1 1 7 -1 3 0 -1 -1 -1\n"
    b"2 5170 30 200 1 -1 -1 1 60 -1 5 -1 -1 -1 0 2 -1 -1\n",
    b'[{"status":"Pass","vc":"e","jobid":"application_1_2","user":"c","submitted_time":'
    b'"2017-10-07 01:11:39","attempts":[{"start_time":"2017-10-07 01:12:09","end_time":'
    b'"2017-10-07 02:13:23","detail":[{"ip":"m47","gpus":["gpu0","gpu1"]}]}]}]',
)
_CURVES = (
    b"name,time,application,num_replicas,batch_size,category,user,gpu_type,most,work_h,scaling\n"
    b"1,0,a,2,65536,adaptive,al,a100,4,0.1,amdahl:0.9\n2,30,b,1,65536,,bo,,2,0.05,1=1;2=1.5\n"
)
_VOLUMES = (
    b'{"version":1,"volume_layers":[{"name":"a","kind":"convolution","channels":[1,8],"extents":'
    b'[[32,32],[32,32]],"windows":[{"kernel":3,"stride":1,"padding":1,"dilation":1,"ceil_mode":'
    b'false}],"parameters":80,"operations":1000}],"kept":[{"channels":8,"extents":[32,32]}]}'
)

_READERS = (
    Reader(schema.load, (schema.ConfigError,), "elastic.toml", (texts._TOML.encode(),)),
    Reader(_past, (accounting_trace.SacctError, workload.WorkloadError), "sacct.txt", ((_DATA / "sacct-week.txt").read_bytes()[:3000],
        b'{"jobs":[{"job_id":1,"user":"a","time":{"submission":1,"start":2,"end":9},"state":'
        b'{"current":["COMPLETED"]},"tres":{"allocated":[{"type":"gres","name":"gpu","count":2}]}}]}')),
    Reader(_past, (accounting_trace.SacctError, workload.WorkloadError), "trace.csv", _TRACES),
    Reader(curve_jobs.read, (workload.WorkloadError,), "curves.csv", (_CURVES,)),
    Reader(lambda path: scaling_curves.rules(str(path)), (scaling_curves.ScalingError,), "scaling.csv",
        (b"match,scaling\n# a\ngpt*,amdahl:0.9\nx,1=1;2=1.9\n*,none\n",)),
    Reader(_profiles, (application_profiles.ApplicationProfileError,), "placements.csv", (_table(),)),
    Reader(neighbour_slowdown.read, (neighbour_slowdown.NeighbourSlowdownError,), "pairs.csv",
        (b"application,other,speed\nbert,vgg,0.5\nvgg,bert,0.9\n",)),
    Reader(network_file.read_network, (network_file.VolumeNetworkError,), "volumes.json", (_VOLUMES,)),
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
