"""Ranks that join and leave a training while it runs.

rank 0      next generation   ──prepare──>  all members form its process group, beside training
            all have formed   ──switch──>   one more value of a step's all-reduce: after that step
                                            all continue in it; newcomers receive the state

Where every rank holds the whole state, newcomers receive it. Pipelines and `shard=True` change
through a checkpoint in the same processes (docs/training-in-place.md).
"""
