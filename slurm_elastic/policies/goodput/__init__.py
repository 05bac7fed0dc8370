"""Policy `goodput`: GPU type and count by the marginal value of GPUs to each job."""
