"""Leader election between two controllers, and the standby's copy of the ledger."""
