"""Make the pyslurm 25.11.2 sdist (argv[1]) build against Slurm 24.11."""

import pathlib
import shutil
import sys

root = pathlib.Path(sys.argv[1]) / "pyslurm"
here = pathlib.Path(__file__).resolve().parent
shutil.copy(here / "compat24.h", root / "slurm" / "compat24.h")

STEP = "        slurm_step_id_t step_id\n"
EDITS = {
    "version.py": [('"25.11.2"', '"24.11.0"')],
    # structures of 24.11 that pyslurm declares itself (layout matters)
    "slurm/extra.pxi": [
        (
            "ctypedef struct job_id_msg_t:\n    slurm_step_id_t step_id\n",
            "ctypedef struct job_id_msg_t:\n    uint32_t job_id\n",
        ),
        (
            "    void *pcon\n    void *conmgr_con\n",
            "    void *pcon\n    int conn_fd\n    void *conmgr_con\n",
        ),
        ("    char *tls_cert\n    void *conn\n    bool conn_is_mtls\n", ""),
        (
            "# Global Environment\n",
            (
                'cdef extern from "pyslurm/slurm/compat24.h" nogil:\n'
                "    uint16_t compat_alloc_cpus(node_info_t *n)\n"
                "    uint64_t compat_alloc_memory(node_info_t *n)\n"
                "    char *compat_alloc_tres(node_info_t *n)\n\n"
                "# Global Environment\n"
            ),
        ),
    ],
    # structures of slurm.h whose job or step is a plain number in 24.11
    "slurm/slurm.h.pxi": [
        (
            "        uint32_t spank_job_env_size\n" + STEP,
            "        uint32_t spank_job_env_size\n        uint32_t job_id\n",
        ),
        (
            "    cdef struct submit_response_msg:\n" + STEP,
            "    cdef struct submit_response_msg:\n        uint32_t job_id\n",
        ),
        (
            "    cdef struct step_update_request_msg:\n" + STEP,
            (
                "    cdef struct step_update_request_msg:\n"
                "        uint32_t job_id\n        uint32_t step_id\n"
            ),
        ),
        ("char* tres_fmt_alloc_str", 'char* tres_fmt_alloc_str "tres_alloc_str"'),
    ],
    "core/job/job.pyx": [
        ("changes.ptr.step_id.job_id", "changes.ptr.job_id"),
        ("msg.step_id.job_id", "msg.job_id"),
        ("self.ptr.licenses_allocated", "NULL"),
        ("self.ptr.submit_line", "NULL"),
        ("self.ptr.segment_size", "0"),
    ],
    "core/job/submission.pyx": [("resp.step_id.job_id", "resp.job_id")],
    "core/job/step.pyx": [
        (
            "        js.umsg.step_id = self.ptr.step_id\n",
            (
                "        js.umsg.job_id = self.ptr.step_id.job_id\n"
                "        js.umsg.step_id = self.ptr.step_id.step_id\n"
            ),
        ),
        ("self.ptr.std_in", "NULL"),
        ("self.ptr.std_out", "NULL"),
        ("self.ptr.std_err", "NULL"),
        ("self.ptr.cwd", "NULL"),
    ],
    "core/slurmctld/config.pyx": [
        ("self.ptr.epilog_timeout", "0"),
        ("self.ptr.prolog_timeout", "0"),
        ("self.ptr.metrics_type", "NULL"),
        ("self.ptr.namespace_plugin", "NULL"),
    ],
    "core/node.pyx": [
        ("self.info.alloc_memory", "slurm.compat_alloc_memory(self.info)"),
        ("self.info.alloc_cpus", "slurm.compat_alloc_cpus(self.info)"),
        (
            "        return cstr.to_dict(self.info.alloc_tres_fmt_str)\n",
            (
                "        cdef char *tres = slurm.compat_alloc_tres(self.info)\n"
                "        try:\n"
                "            return cstr.to_dict(tres)\n"
                "        finally:\n"
                "            xfree(tres)\n"
            ),
        ),
    ],
    "db/step.pyx": [
        ("self.ptr.cwd", "NULL"),
        ("self.ptr.std_in", "NULL"),
        ("self.ptr.std_out", "NULL"),
        ("self.ptr.std_err", "NULL"),
        ("self.ptr.timelimit", "0"),
    ],
    "db/job.pyx": [
        ("self.ptr.resv_req", "NULL"),
        ("self.ptr.segment_size", "0"),
    ],
}

for name, pairs in EDITS.items():
    path = root / name
    text = path.read_text()
    for old, new in pairs:
        if text.count(old) != 1:
            sys.exit(f"{name}: {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    path.write_text(text)
