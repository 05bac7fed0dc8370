"""selasticd: reads the cluster, decides, applies."""
