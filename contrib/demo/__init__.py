"""`make demo`: elastic jobs on a real Slurm cluster, shown live, checked and drawn.

`runner` runs it: `demo_cluster` (the containers), `scenario` (which jobs are submitted when),
`scenario_runner` and `cluster_watch` (carry it out and observe it), `screen` (live display),
`sacct`, `training_logs`, `checks` (the verdict), `timeline` (the picture).

The verdict uses sacct and the jobs' own logs only, not what the controller reports.
"""
