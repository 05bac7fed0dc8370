"""Pipelines: a model cut into stages x replicas, driven over torch.distributed.

The rooms: layout.py says which ranks hold which stage, schedules.py in which order they
work, stages.py and stashing.py what a stage keeps, links.py what travels between
stages, sharing.py and gradients.py what replicas and tied weights add up, world.py how
ranks meet; engine.py drives it all.
"""

from __future__ import annotations

from slurm_elastic.training.pipeline.pipeline_engine import PipelineEngine
from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stage_links import LinkError
from slurm_elastic.training.pipeline.stages import cut

__all__ = ["LayoutError", "LinkError", "PipelineEngine", "StageLayout", "cut"]
