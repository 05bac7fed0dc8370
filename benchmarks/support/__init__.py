"""Parts of several benchmarks, and programs that they run in containers or as ranks."""
