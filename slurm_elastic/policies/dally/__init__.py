"""Policy `dally`: delay timers and leases in rounds."""
