"""The integer program that assigns configurations to jobs, and its solvers."""
