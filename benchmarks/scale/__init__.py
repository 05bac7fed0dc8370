"""A large cluster with simulated users, with selasticd and without."""
