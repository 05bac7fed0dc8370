"""The only rooms that know slurmctld."""
