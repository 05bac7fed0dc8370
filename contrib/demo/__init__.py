"""`make demo`: elastic jobs on a real Slurm cluster, watched, drawn and judged.

`__main__` plays it: `cluster` (the containers) → `scene` (who submits what,
when) → `director` and `watch` (it happens) → `screen` (people look at it) →
`accounting`, `logs`, `verdict` (what is proven) → `timeline` (the picture).

The verdict comes from sacct and from what the jobs wrote, never from what the
controller says of itself.
"""
