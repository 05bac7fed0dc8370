"""Shell commands that let slurmctld forget its last seconds, as one does that is killed.

It saves its jobs every 5 s. Here it falls back to a copy that the test has made itself, so that the
moment does not matter; or it is killed at a moment that is known.
"""

_STATE = "/var/lib/slurm/ctld"

#: Keep the jobs that slurmctld has saved.
KEEP = f"cp -a {_STATE}/job_state /tmp/kept_job_state"
#: Print when slurmctld saved its jobs last, epoch s.
SAVED_AT = f"stat -c %Y {_STATE}/job_state"
#: Kill slurmctld, and start it again with the jobs that were kept. After a reconfiguration Debian's
#: is named slurmctld-wlm.
FORGET = (
    "pkill -9 slurmctld; while pgrep slurmctld >/dev/null; do sleep 0.05; done; "
    f"for file in job_state job_state.old; do cp -a /tmp/kept_job_state {_STATE}/$file; done; "
    "cluster-start slurmctld"
)
#: Wait until slurmctld has saved its jobs less than two seconds ago.
SAVED = f"while [ $(($(date +%s) - $(stat -c %Y {_STATE}/job_state))) -gt 1 ]; do sleep 0.1; done"
