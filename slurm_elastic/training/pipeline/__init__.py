"""Pipelines: training of a model in stages x replicas over torch.distributed.

stage_layout        the ranks of each stage
schedules           the order of passes on each rank
stages              one stage, synchronous
weight_stashing     one stage, with PipeDream's weight stashing
stage_links         activations and gradients between stages
stage_groups        process groups, and the comparison of what ranks hold
shared_parameters   parameters of replicas and tied weights
gradients           sums of gradients in flat buckets
pipeline_engine     a whole step
"""

from __future__ import annotations

from slurm_elastic.training.pipeline.pipeline_engine import PipelineEngine
from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stages import cut
from slurm_elastic.training.ranks.link_errors import LinkError

__all__ = ["LayoutError", "LinkError", "PipelineEngine", "StageLayout", "cut"]
