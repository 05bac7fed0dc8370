"""Programs that benchmarks run beside themselves: in containers, or as ranks."""
