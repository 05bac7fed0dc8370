"""Reading slurmctld: one reader, with pyslurm or with the JSON of Slurm's commands."""
