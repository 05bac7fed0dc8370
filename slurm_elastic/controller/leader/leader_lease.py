"""Rules of the lease that decides which of two controllers acts. Pure, without a clock.

slurmctld is the arbiter. The lease of generation n is a reservation
`selastic_active_<n>` that keeps no node from any job; its comment names the
holder and counts renewals (beats). Making a reservation whose name exists fails, so that
of several attempts at generation n+1 one succeeds: compare-and-set.

With T the seconds of `takeover_s`, all on each host's own steady clock:

- The holder renews the lease (a beat) every T/6, and may write to Slurm until T/2 after it *began*
  the last beat that slurmctld took (`Tenure`). After that it stands by.
- A standby looks every T/12. It makes the next generation when it has seen the same lease with the
  same beat for T, from the *end* of the first look on, looks at most T/3 apart
  (`LeaseObservation`); or at once, when the holder has given the lease back.
- The maker of a lease beats without a right for `DURABLE_S`, and begins only if the lease is still
  there (`LeaseClaim`): a slurmctld that dies loses the changes of its last five seconds.

So a holder's right ends T/2 before another begins. That half covers one beat that no look saw
because slurmctld died and lost it: begun at most T/2 after the last beat seen, it gave a right for
T/2 more.

>>> lease = LeaseMark("selastic_active_7", "slurm-elastic lease: holder=h1:7321 id=a3 beat=12")
>>> lease.generation, lease.holder, lease.free
(7, 'h1:7321', False)
>>> watch = LeaseObservation(30.0)
>>> [watch.look(lease, began=t, ended=t + 0.1) for t in (0.0, 9.0, 18.0, 27.0, 30.0, 30.2)]
[False, False, False, False, False, True]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

#: Parts of `takeover_s`.
BEAT, LOOK, RIGHT, GAP = 1 / 6, 1 / 12, 1 / 2, 1 / 3
#: Seconds after which slurmctld has saved a change (measured: five).
DURABLE_S = 6.0

_COMMENT = "slurm-elastic lease:"
_FREE = "state=free"
_HOLDER = re.compile(r"\bholder=(\S{1,200})")
_ID = re.compile(r"\bid=([0-9a-f]{1,32})\b")


@dataclass(frozen=True, slots=True)
class LeaseMark:
    """One lease as slurmctld shows it; equal marks in two looks mean no renewal between them.

    Attributes:
        name: of the reservation.
        comment: all of it.
    """

    name: str
    comment: str

    @property
    def generation(self) -> int:
        """The number in its name; 0 for a reservation made by hand."""
        digits = self.name.rpartition("_")[2]
        return int(digits) if digits.isascii() and digits.isdigit() else 0

    @property
    def holder(self) -> str:
        """The address of the holder; "" when the comment has none."""
        match = _HOLDER.search(self.comment)
        return match[1] if match else ""

    @property
    def id(self) -> str:
        """Id that distinguishes the processes of one holder."""
        match = _ID.search(self.comment)
        return match[1] if match else ""

    @property
    def free(self) -> bool:
        """Whether its holder has given it back."""
        return _FREE in self.comment.split()


def newest(marks: Iterable[LeaseMark]) -> LeaseMark | None:
    """Return the lease that counts: that of the highest generation."""
    return max(marks, key=lambda m: m.generation, default=None)


def comment_of(*, holder: str, id_: str, beat: int, free: bool = False) -> str:
    """Return the comment of a lease."""
    return f"{_COMMENT} holder={holder} id={id_} beat={beat} {_FREE if free else 'state=held'}"


class LeaseObservation:
    """Looks of a standby at the lease, which decide whether it may be taken.

    Args:
        takeover_s: see above.
    """

    def __init__(self, takeover_s: float) -> None:
        self._takeover_s = takeover_s
        self._seen: LeaseMark | None = None
        self._first: float | None = None  # end of the look that saw it first
        self._last = 0.0

    def look(self, mark: LeaseMark | None, *, began: float, ended: float) -> bool:
        """Record one successful look; return whether the next generation may be made now.

        Args:
            mark: the lease that counts; None: there is none.
            began: seconds of a clock that goes on while the machine sleeps.
            ended: likewise.
        """
        steady = self._first is not None and began - self._last <= self._takeover_s * GAP
        if not steady or mark != self._seen:
            self._first = ended
        self._seen, self._last = mark, ended
        if mark is not None and mark.free:
            return True
        return self._first is not None and began - self._first >= self._takeover_s


class Tenure:
    """Time until which the holder may write.

    Args:
        takeover_s: see above.
        began: when it began to make the lease.
    """

    def __init__(self, takeover_s: float, began: float) -> None:
        self._right_s = takeover_s * RIGHT
        self._until = began + self._right_s
        self._over = False

    def renewed(self, began: float, ended: float) -> bool:
        """Record a renewal; return whether it was in time. A late one restores no right."""
        if self.left(ended) > 0:
            self._until = max(self._until, began + self._right_s)
        return self.left(ended) > 0

    def left(self, now: float) -> float:
        """Return the seconds for which it may write; once 0, always 0."""
        self._over = self._over or now >= self._until
        return 0.0 if self._over else self._until - now

    def end(self) -> None:
        """End the tenure: no more writes."""
        self._over = True


class LeaseClaim:
    """A lease just made, until slurmctld has saved it.

    Args:
        name: of the lease.
        id_: in its comment.
        tenure: begins with the claim, is renewed like a holder's, and gives no right before.
        made: when slurmctld had answered.
    """

    def __init__(self, name: str, id_: str, tenure: Tenure, *, made: float) -> None:
        self.name, self._id, self.tenure, self._made = name, id_, tenure, made

    def stands(self, mark: LeaseMark | None) -> bool:
        """Return whether the lease that counts is still this one."""
        return mark is not None and mark.name == self.name and mark.id == self._id

    def lasts(self, began: float) -> bool:
        """Return whether a lease seen by a look begun then is saved by slurmctld."""
        return began - self._made >= DURABLE_S
