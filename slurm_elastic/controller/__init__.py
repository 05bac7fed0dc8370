"""selasticd: reads the cluster, decides, and carries decisions out."""
