"""The registry of all codes of reasons, by area; docs/reasons.md is made from it."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.core.reasons import (
    controller_codes,
    launcher_codes,
    placement_codes,
    policy_codes,
)
from slurm_elastic.core.reasons.reason_definition import ReasonDefinition

AREAS: Mapping[str, tuple[ReasonDefinition, ...]] = {
    "Placement": placement_codes.PLACEMENT,
    "Other jobs": placement_codes.OTHER_JOBS,
    "Sizes and places": placement_codes.SIZES,
    "Jobs that are left alone": placement_codes.ELIGIBILITY,
    "Limits of the site": placement_codes.SITE_LIMITS,
    "All policies": policy_codes.ALL_POLICIES,
    "Policy fair": policy_codes.FAIR,
    "Policies fifo, static, srtf, las, gavel, themis, shockwave and pollux": policy_codes.BASELINES,
    "Policies sia, icefrog and goodput": policy_codes.GOODPUT,
    "Policy elastic_batch": policy_codes.ELASTIC_BATCH,
    "Policy dally": policy_codes.DALLY,
    "Changes under way": controller_codes.TRANSITIONS,
    "Changes in place": controller_codes.IN_PLACE,
    "Members of a job": launcher_codes.MEMBERS,
    "Changes that fail": controller_codes.TRIALS,
    "Held jobs": controller_codes.GUARD,
    "Batches": controller_codes.BATCH,
    "Notes": controller_codes.NOTES,
}

#: All definitions by code.
DEFINITIONS: Mapping[str, ReasonDefinition] = {
    definition.code: definition for area in AREAS.values() for definition in area
}
