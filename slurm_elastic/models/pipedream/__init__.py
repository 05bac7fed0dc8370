"""PipeDream's partitioner: a layer profile becomes stages, each with its replicas."""
