"""The library that a training script imports.

>>> from slurm_elastic.training import init            # doctest: +SKIP
>>> job = init(model, loss_fn, optimizer, dataset, global_batch=256, epochs=3,
...            checkpoint_dir="ckpt")                  # doctest: +SKIP
>>> for batch in job:                                  # doctest: +SKIP
...     loss = job.step(batch)
>>> job.finish()                                       # doctest: +SKIP

Import it before torch: it imports torch faster (`faststart`).
"""

from __future__ import annotations

from slurm_elastic.training.faststart import import_torch

import_torch()

from slurm_elastic.core.errors import SlurmElasticError  # noqa: E402
from slurm_elastic.training.checkpoint.checkpoint_directory import CheckpointError  # noqa: E402
from slurm_elastic.training.freezing.criteria import CriterionInputs  # noqa: E402
from slurm_elastic.training.freezing.freezer import Freezing  # noqa: E402
from slurm_elastic.training.loader import Batch  # noqa: E402
from slurm_elastic.training.loop.elastic_loop import ElasticLoop  # noqa: E402
from slurm_elastic.training.setup import init  # noqa: E402
from slurm_elastic.training.training_job import TrainingJob  # noqa: E402

__all__ = [
    "Batch",
    "CheckpointError",
    "CriterionInputs",
    "ElasticLoop",
    "Freezing",
    "SlurmElasticError",
    "TrainingJob",
    "init",
]
