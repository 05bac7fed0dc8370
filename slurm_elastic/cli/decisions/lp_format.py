r"""The integer program of a round as text in the LP format, which every solver reads.

A variable is named by job, GPU type, nodes and GPUs: `j4711_a100_n1_g8` is 1 if job 4711 gets
8 a100 on one node; `wait_4711` is 1 if it gets nothing. Where half of a GPU is a configuration,
GPUs are counted in halves: `j4711_a100_n1_h16`.

>>> print(lp_text({
...     "not_running": 1.1, "capacity": {"a100": 4}, "partial": False,
...     "configurations": [{"gpu_type": "a100", "nodes": 1, "gpus": 2}],
...     "jobs": [{"job_id": 7, "display_id": "7", "configurations": [0], "costs": [0.5],
...               "fixed": None, "chosen": 0}],
...     "limits": [{"left": 3.0, "uses": [[2.0]]}],
... }))
\ Each job gets one configuration or waits; least cost.
Minimize
 cost:
  + 0.5 j7_a100_n1_g2
  + 1.1 wait_7
Subject To
 job_7:
  + 1 j7_a100_n1_g2
  + 1 wait_7
  = 1
 gpus_a100:
  + 2 j7_a100_n1_g2
  <= 4
 limit_1:
  + 2.0 j7_a100_n1_g2
  <= 3.0
Binaries
 j7_a100_n1_g2
 wait_7
End
<BLANKLINE>
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slurm_elastic.rpc.program_answers import ProgramAnswer

_ILLEGAL = re.compile(r"[^A-Za-z0-9_]", re.ASCII)


def lp_text(program: ProgramAnswer, *, comments: Sequence[str] = ()) -> str:
    """Return the program in the LP format.

    Args:
        program: as the controller answers it.
        comments: further lines for its head.
    """
    types = _names(program["capacity"])
    # A controller of an earlier version counts whole GPUs.
    counted = "h" if program.get("parts_per_gpu", 1) == 2 else "g"
    # Costs, sums and names in the order of the jobs: the same program is the same text.
    variables: list[str] = []
    costs: list[str] = []
    rows: list[str] = []
    of_type: dict[str, list[str]] = {name: [] for name in program["capacity"]}
    # Nor does it name limits.
    limits = program.get("limits", [])
    of_limit: list[list[str]] = [[] for _ in limits]
    for row, job in enumerate(program["jobs"]):
        name = _ILLEGAL.sub("_", job["display_id"])
        sums = []
        for order, (at, cost) in enumerate(zip(job["configurations"], job["costs"], strict=True)):
            shape = program["configurations"][at]
            kind = shape["gpu_type"]
            variable = f"j{name}_{types[kind]}_n{shape['nodes']}_{counted}{shape['gpus']}"
            variables.append(variable)
            costs.append(_term(cost, variable))
            sums.append(_term(1, variable))
            of_type[kind].append(_term(shape["gpus"], variable))
            for limit, terms in zip(limits, of_limit, strict=True):
                if use := limit["uses"][row][order]:
                    terms.append(_term(use, variable))
        if job["fixed"] is None:
            variables.append(f"wait_{name}")
            costs.append(_term(program["not_running"], f"wait_{name}"))
            sums.append(_term(1, f"wait_{name}"))
        rows += [f" job_{name}:", *sums, "  = 1"]
    for kind, terms in of_type.items():
        if terms:
            rows += [f" gpus_{types[kind]}:", *terms, f"  <= {program['capacity'][kind]}"]
    for number, (limit, terms) in enumerate(zip(limits, of_limit, strict=True), start=1):
        rows += [f" limit_{number}:", *terms, f"  <= {limit['left']!r}"]
    head = [*comments, "Each job gets one configuration or waits; least cost."]
    if counted == "h":
        head.append("GPUs are counted in halves.")
    if program["partial"]:
        head.append("Jobs of other users are left out, and so are the GPUs that they got.")
    return "\n".join(
        [
            *(f"\\ {_comment(line)}" for line in head),
            "Minimize",
            " cost:",
            *costs,
            "Subject To",
            *rows,
            "Binaries",
            *(f" {v}" for v in variables),
            "End",
            "",
        ]
    )


def _term(factor: float, variable: str) -> str:
    return f"  {'-' if factor < 0 else '+'} {abs(factor)!r} {variable}"


def _names(types: Sequence[str] | dict[str, int]) -> dict[str, str]:
    """Return a name for each GPU type that the format allows, all different."""
    names: dict[str, str] = {}
    for kind in types:
        name = plain = _ILLEGAL.sub("_", kind)
        number = 2
        while name in names.values():
            name, number = f"{plain}_{number}", number + 1
        names[kind] = name
    return names


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
