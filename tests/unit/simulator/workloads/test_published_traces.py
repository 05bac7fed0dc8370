"""Traces that others have published: their own examples, and rows that do not fit."""

import json

import pytest

from slurm_elastic.simulator.workloads import accounting_trace
from slurm_elastic.simulator.workloads.accounting_row import SacctError

HELIOS = """\
job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1425511,uXB,vcJ,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,3684,
1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:42:27,2020-06-09 18:46:36,249,60
1425513,uzq,vcp,0,1,1,CANCELLED,2020-06-09 18:41:28,2020-06-09 18:41:28,2020-06-17 14:15:21,67523,
1425514,uzqls,vcpDC,8,8,1,CANCELLED,2020-06-09 18:41:28,,,,
"""
ACME = (
    "job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,"
    "start_time,end_time,fail_time,stop_time,duration,queue,gpu_time\n"
    "dlctk696s0jbvitv,uf794,8,64,960,1000,100.0,Pretrain,FAILED,2023-05-17 11:00:58+00:00,"
    "2023-05-17 11:01:08+00:00,2023-05-17 11:02:16+00:00,2023-05-17 11:01:16+00:00,,"
    "68,10.0,1152.0\n"
)
PODS = """\
name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0001,6000,12288,1,460,,LS,Running,427061,12902960,427061
openb-pod-0017,88000,327680,8,1000,,Burstable,Succeeded,9437497,10769854,9437500
openb-pod-0018,88000,327680,2,1000,,BE,Pending,9437497,9437499.0,
"""
JOBS = """\
job_name,organization,gpu_model,cpu_request,gpu_request,worker_num,submit_time,duration,job_type
437260,57,A100-SXM4-80GB,15,1,16,9589663,41060,Spot
"""
TASKS = """\
4f057009a5d481acec67b088,tensorflow,1.0,Terminated,1739162.0,1739262.0,600.0,29.296875,50.0,MISC
4f057009a5d481acec67b088,ps,2.0,Terminated,1739162.0,1739262.0,600.0,29.296875,,
b,worker,4.0,Failed,1739200.0,1739900.0,600.0,29.296875,200.0,V100
c,worker,4.0,Waiting,,,600.0,29.296875,100.0,V100
"""
TASKS_HEADER = (
    "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
)
TASKS_AS_JOBS = """\
job_id,num_inst,submit_time,num_cpu,num_gpu,gpu_type,duration,user
7,2,500,6.0,0.5,T4,3600.0,u1
8,3,600,6.0,2.0,V100,3600.0,u2
9,1,600,6.0,0.0,CPU,3600.0,u2
"""
SUPERCLOUD = """\
id_job,id_user,nodes_alloc,timelimit,time_submit,time_eligible,time_start,time_end,state,partition,tres_alloc
88,5,2,1440,1610000000,1610000000,1610000060,1610003660,3,g,"1=40,2=170000,4=2,5=40,1002=4"
89,5,1,4294967295,1610000000,1610000000,1610000060,1610000960,6,g,"1=20,4=1,1001=1"
90,6,1,60,1610000000,1610000000,1610000060,1610003660,3,c,"1=40,2=170000,4=2,5=40"
91,6,0,60,1610000000,1610000000,0,1610003660,4,g,
92,6,1,60,1610000000,1610000000,1610000060,0,1,g,"1=20,4=1,1002=1"
"""
TIRESIAS = (
    "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,8,0,606,vgg19,164,30\n"
)
SWF = """\
; Version: 2
; UnixStartTime: 1000000
1    5094 -1   12072  16 -1 -1 -1 -1 -1 1 7 -1 3 0 -1 -1 -1
2    5170 30     200   1 -1 -1  1 60 -1 5 -1 -1 -1 0 2 -1 -1
3    5170 30     200   1 -1 -1  1 60 -1 2 -1 -1 -1 0 2 -1 -1
4    5170 -1      -1   1 -1 -1  1 60 -1 5 -1 -1 -1 0 2 -1 -1
"""
SHOCKWAVE = """\
LM (batch size 10)\tpython3 main.py\tlm\t--steps\t1\t134583\t1\tgns\t1\t-1.0\t1418\t0
ResNet-18 (batch size 32)\tpython3 main.py\tcifar\t-n\t1\t143450\t4\tstatic\t1\t-1.0\t3338\t55
"""
GAVEL = "CycleGAN\tcd %s && python3 cyclegan.py\t--n_steps\t1\t71711\t17.000000\t1\n"
PHILLY = [
    {"status": "Killed", "vc": "ee9e8c", "jobid": "application_1506638472019_14199",
     "user": "ce2f4c",     "submitted_time": "2017-10-07 01:11:39", "attempts": [
        {"start_time": "2017-10-07 01:12:09", "end_time": "2017-10-07 01:13:23",
         "detail": [{"ip": "m47", "gpus": ["gpu0", "gpu1"]}]},
        {"start_time": "2017-10-07 01:13:30", "end_time": "2017-10-07 02:13:30",
         "detail": [{"ip": "m4", "gpus": ["gpu0"]}, {"ip": "m5", "gpus": ["gpu0"]}]}]},
    {"status": "Failed", "vc": "x", "jobid": "application_1_2", "user": "u", "attempts": [],
     "submitted_time": "2017-10-07 01:11:39"},
    {"status": "Pass", "vc": "x", "jobid": "application_1_3", "user": "u",
     "submitted_time": "2017-10-07 01:11:39", "attempts": [
        {"start_time": "2017-10-07 01:12:09", "end_time": "None",
         "detail": [{"ip": "a", "gpus": ["0"]}]}]},
]  # fmt: skip


def read(tmp_path, text, name="trace.csv"):
    path = tmp_path / name
    path.write_text(text)
    return accounting_trace.read(path)


def test_helios(tmp_path):
    past = read(tmp_path, HELIOS)
    one, four = past.jobs
    assert (one.job_id, one.user, one.partition, one.seconds) == (
        "1425511",
        "uXB",
        "vcJ",
        3684,
    )
    assert (four.main.gpus, four.state, four.end - four.submit) == (4, "FAILED", 309)
    assert past.left_out == {"never started": 1, "without GPUs": 1}


def test_acme(tmp_path):
    (job,) = read(tmp_path, ACME).jobs
    assert (job.name, job.submit, job.main.gpus, job.main.nodes) == ("Pretrain", 1684321258, 64, 8)


def test_pods_of_alibaba(tmp_path):
    past = read(tmp_path, PODS)
    assert [(j.job_id, j.main.gpus, j.state, j.partition) for j in past.jobs] == [
        ("openb-pod-0001", 1, "CANCELLED", "LS"),
        ("openb-pod-0017", 8, "COMPLETED", "Burstable"),
    ]
    assert past.jobs[1].seconds == 10769854 - 9437500
    assert past.left_out == {"never started": 1}
    assert past.notes["on a part of a GPU (counted as a whole one)"] == 1


def test_jobs_of_alibaba(tmp_path):
    past = read(tmp_path, JOBS)
    (job,) = past.jobs
    assert (job.main.gpus, job.main.nodes, job.main.gpu_type) == (16, 16, "A100-SXM4-80GB")
    assert (job.submit, job.end) == (9589663, 9589663 + 41060)
    assert past.notes == {"without a time of start (waits count as none)": 1}


@pytest.mark.parametrize("header", ["", TASKS_HEADER], ids=["as published", "with its header"])
def test_tasks_of_alibaba_in_2020(tmp_path, header):
    past = read(tmp_path, header + TASKS)
    half, eight = past.jobs
    assert (half.job_id, half.seconds, half.main.gpus, half.main.gpu_type) == (
        "4f057009a5d481acec67b088/tensorflow", 100, 1, "MISC",
    )  # fmt: skip
    assert (eight.job_id, eight.main.gpus, eight.main.nodes, eight.state) == (
        "b/worker", 8, 4, "FAILED",
    )  # fmt: skip
    assert past.left_out == {"without GPUs": 1, "never started": 1}
    tasks = "tasks of jobs (each counts as a job, waits count as none)"
    assert past.notes[tasks] == 1
    assert past.notes[f"{tasks} on a part of a GPU (counted as a whole one)"] == 1


def test_a_task_of_alibaba_that_is_cut_is_named_with_its_line(tmp_path):
    with pytest.raises(SacctError, match=r"trace.csv:4: 3 cells under 10 columns"):
        read(tmp_path, "\n".join([*TASKS.splitlines()[:3], "d,worker,4.0"]))


def test_sampled_jobs_of_alibaba_in_2020(tmp_path):
    past = read(tmp_path, TASKS_AS_JOBS)
    assert [(j.job_id, j.user, j.main.gpus, j.main.nodes, j.seconds) for j in past.jobs] == [
        ("7", "u1", 1, 2, 3600),
        ("8", "u2", 6, 3, 3600),
    ]


def test_mit_supercloud(tmp_path):
    past = read(tmp_path, SUPERCLOUD)
    four, one = past.jobs
    assert (four.job_id, four.user, four.main.gpus, four.main.gpu_type, four.main.nodes) == (
        "88", "5", 4, "volta", 2,
    )  # fmt: skip
    assert (four.limit_s, four.seconds, four.main.start - four.submit) == (86400, 3600, 60)
    assert (one.main.gpu_type, one.state, one.limit_s) == ("tesla", "TIMEOUT", None)
    assert past.left_out == {"without GPUs": 1, "never started": 1, "without a run time": 1}


def test_tiresias(tmp_path):
    (job,) = read(tmp_path, TIRESIAS).jobs
    assert (job.job_id, job.submit, job.main.gpus, job.name) == ("0", 0, 8, "vgg19")


def test_shockwave(tmp_path):
    past = read(tmp_path, SHOCKWAVE, "a.trace")
    assert [(j.name, j.submit, j.seconds, j.main.gpus) for j in past.jobs] == [
        ("LM (batch size 10)", 0, 1418, 1),
        ("ResNet-18 (batch size 32)", 55, 3338, 4),
    ]


def test_gavels_trace_has_no_run_times(tmp_path):
    with pytest.raises(SacctError, match=r"a.trace:1: a job of Gavel's has steps and no run time"):
        read(tmp_path, GAVEL, "a.trace")


def test_standard_workload_format(tmp_path):
    past = read(tmp_path, SWF, "a.swf")
    first, second = past.jobs
    assert (first.submit, first.main.gpus, first.user, first.name) == (1005094, 16, "user7", "app3")
    assert (second.runs[0].start, second.state, second.partition, second.limit_s) == (
        1005200, "CANCELLED", "2", 60,
    )  # fmt: skip
    assert past.left_out == {"never started": 1}
    assert past.notes == {
        "of processors (each counts as a GPU)": 1,
        "of processors (each counts as a GPU), without a time of start (waits count as none)": 1,
        "that failed, timed out or were cancelled (as far as they came)": 1,
    }
    assert read(tmp_path, SWF.split("\n", 2)[2], "b.swf").jobs[0].submit == 5094


def test_philly(tmp_path):
    past = read(tmp_path, json.dumps(PHILLY), "cluster_job_log")
    (job,) = past.jobs
    assert (job.job_id, job.partition, job.state, len(job.runs)) == (
        "1506638472019_14199", "ee9e8c", "CANCELLED", 2,
    )  # fmt: skip
    assert (job.seconds, job.main.gpus, job.main.nodes) == (74 + 3600, 2, 2)
    assert past.left_out == {"never started": 1, "without a run time": 1}


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (
            HELIOS,
            ",3684,",
            ",long,",
            'trace.csv:2: duration "long" is invalid: expected a number from 0',
        ),
        (
            HELIOS,
            ",4,16,",
            ",-4,16,",
            'trace.csv:3: gpu_num "-4" is invalid: expected a number from 0 on',
        ),
        (HELIOS, ",60\n", "\n", "trace.csv:3: 11 cells under 12 columns of Helios and Acme"),
        (
            HELIOS,
            "2020-06-09 18:41:01",
            "June",
            'trace.csv:2: submit_time: "June" is invalid: expected a time',
        ),
        (HELIOS, "1425512", "", 'trace.csv:3: job_id "" is invalid'),
        (HELIOS, "1425511,uX", '1425511,"uX', "trace.csv:2: 2 cells under 12 columns"),
        (SWF, "-1 -1\n2", "-1\n2", "trace.csv:3: .* is no job: expected 18 numbers"),
        (SWF, " 5094", " -5094", "trace.csv:3: time of submission -5094 is invalid"),
        (PODS, ",8,1000", ",8x,1000", 'trace.csv:3: num_gpu "8x" is invalid: expected a number'),
    ],
)
def test_rows_that_do_not_fit_are_named(tmp_path, text, old, new, words):
    assert old in text
    with pytest.raises(SacctError, match=words):
        read(tmp_path, text.replace(old, new, 1))


def test_an_unclosed_quotation_mark_in_a_long_file(tmp_path):
    text = HELIOS.replace("uXB", '"uXBbc') + HELIOS.splitlines()[2].join("\n\n") * 2000
    with pytest.raises(SacctError, match=r"trace.csv:2: field larger than field limit"):
        read(tmp_path, text)


def test_jobs_of_philly_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(
        SacctError, match=r"trace.csv: job 2 has no jobid, submitted_time and attempts"
    ):
        read(tmp_path, json.dumps([PHILLY[0], {"jobid": "x"}]))
