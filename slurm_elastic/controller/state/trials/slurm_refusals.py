"""Changes that Slurm refuses: how long their shapes are barred, and other sizes with them. Pure.

The second refusal of a shape bars it (`ShapeRecord.refuse`):

- for good, if Slurm shows that no placement is possible ("BadConstraints": a topology that this
  program does not know), and with it the other sizes that need as many nodes;
- for `REFUSAL_S`, if Slurm has another reason (a limit that this program does not know), and
  with it the upper half of the sizes between it and the job's own: otherwise each of them would
  cost two requeues.
"""

from __future__ import annotations

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason

#: Slurm's reason of a job whose request no allocation can fulfil.
IMPOSSIBLE = "BadConstraints"
#: Seconds for which a shape is barred that Slurm refuses for another reason: limits are changed,
#: and used-up budgets are filled again (our choice).
REFUSAL_S = 6 * 3600.0


def is_temporary(reason: Reason) -> bool:
    """Return whether a shape is barred for a refusal whose cause may end."""
    if reason.code == "not-started":
        return reason.parameters.get("slurm_reason") != IMPOSSIBLE
    return reason.code in ("slurm-refused", "runs-elsewhere", "no-gpus-held", "change-partial")


def sizes_refused_with(planned: Allocation, reason: Reason, *, old: Allocation | None) -> range:
    """Return the other numbers of GPUs that Slurm would refuse for the same reason.

    Args:
        planned: allocation that Slurm refused.
        reason: why.
        old: allocation that the job had before; None: none.
    """
    if is_temporary(reason):
        if old is None or old.gpu_type != planned.gpu_type:
            return range(0)
        return range((old.gpus + planned.gpus) // 2 + 1, planned.gpus)
    nodes, most = len(planned.nodes), max(map(planned.on, planned.nodes))
    return range((nodes - 1) * most + 1, nodes * most + 1) if nodes > 1 else range(0)
