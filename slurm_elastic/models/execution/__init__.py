"""Step times and memory of execution plans (`slurm_elastic.core.execution.execution_plan`)."""
