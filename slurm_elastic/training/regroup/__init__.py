"""Ranks that join and leave a training while it runs.

rank 0      next generation   ──prepare──>  all members form its process group, beside training
            all have formed   ──switch──>   one more value of a step's all-reduce: after that step
                                            all continue in it; newcomers receive the state

Data parallel trainings only, as every rank holds the whole state (docs/training.md).
"""
