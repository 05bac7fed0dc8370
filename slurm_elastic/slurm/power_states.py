"""Slurm's words about a node's power, in its state (`IDLE+POWERED_DOWN`). Pure.

>>> can_wake("IDLE+POWERED_DOWN"), can_wake("DOWN+POWERED_DOWN"), can_wake("IDLE")
(True, False, False)
"""

from __future__ import annotations

#: A node that is, or is to be, without power; and one that gets it back.
_DOWN = frozenset({"POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"})
_UP = frozenset({"POWER_UP", "POWERING_UP"})
#: States with which a node comes to no job, with or without power.
_LOST = ("DOWN", "FAIL", "FUTURE", "INVAL", "ERROR")
_SET_APART = ("DRAIN", "MAINT", "REBOOT")


def words(state: str) -> frozenset[str]:
    """Return the words of a state."""
    return frozenset(state.split("+"))


def loses_power(state: str) -> bool:
    """Return whether a node has no power, or is about to lose it."""
    present = words(state)
    return bool(present & _DOWN) and not present & _UP


def has_no_power(state: str) -> bool:
    """Return whether a node can be woken: Slurm ignores that while a node loses its power."""
    present = words(state)
    return "POWERED_DOWN" in present and not present & _UP


def gains_power(state: str) -> bool:
    """Return whether a node boots, or is to boot."""
    return bool(words(state) & _UP)


def is_lost(state: str) -> bool:
    """Return whether Slurm has given up a node, such as one that has not come up in time."""
    return any(word.startswith(_LOST) for word in words(state) - _DOWN)


def can_wake(state: str) -> bool:
    """Return whether Slurm starts jobs on this node after a boot."""
    present = words(state)
    if is_lost(state) or not present & (_DOWN | _UP):
        return False
    set_apart = any(part in word for word in present for part in _SET_APART)
    return "IDLE" in present and not set_apart
