"""The only package that talks to slurmctld and slurmdbd."""
