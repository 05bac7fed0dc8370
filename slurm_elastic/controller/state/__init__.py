"""What the controller knows and keeps: the ledger, stored jobs, observations, usage."""
