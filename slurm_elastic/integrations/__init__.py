"""Helpers for trainings that keep their framework: transformers, accelerate, Lightning, DeepSpeed.

Each is a module of its own, which imports its framework and is optional (docs/integrations.md). All
of them keep the global batch in any number of ranks. Those that own the loop save when esrun asks
for it, so that a resize loses no step; esrun then watches the checkpoints as it does for any
script (`esrun --checkpoint`).
"""

import slurm_elastic.training  # noqa: F401 - without torch it ends with one line, not a traceback
