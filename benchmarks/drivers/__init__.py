"""What benchmarks run beside themselves: in containers, or as ranks of their own."""
