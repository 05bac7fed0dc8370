"""Persistent state of the controller: the ledger, stored jobs, observations, usage."""
