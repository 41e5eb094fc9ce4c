"""When lines of cron fire: five fields, minutes to weekdays, in the local time of a zone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

MONTHS: Mapping[str, int] = {
    name: number
    for number, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split(), start=1)
}
WEEKDAYS: Mapping[str, int] = {
    name: number for number, name in enumerate("sun mon tue wed thu fri sat".split())
}
#: What each field is called, its least and largest value, and names for its values. Sunday is 0 and 7.
FIELDS: Sequence[tuple[str, int, int, Mapping[str, int]]] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, MONTHS),
    ("weekday", 0, 7, WEEKDAYS),
)
#: The longest time between two times of one line: from one 29 February over a year like 2100 to the next.
LONGEST_DAYS = 8 * 366 + 1


@dataclass(frozen=True, slots=True)
class CronLine:
    """One line: at which minutes it fires."""

    text: str
    minutes: Sequence[int]
    hours: Sequence[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    #: As in cron, a day of the month or a weekday is enough where both are given.
    is_either_day: bool

    @classmethod
    def parse(cls, text: str) -> CronLine:
        """Return the line that ``text`` is, such as ``"30 8 * * mon-fri"``.

        Raises
        ------
        ValueError
            It is none; the message names the field.
        """
        parts = text.lower().split() if isinstance(text, str) else []
        if len(parts) != len(FIELDS):
            names = ", ".join(field[0] for field in FIELDS)
            raise ValueError(f"{text!r} is no line of cron; it takes five fields: {names}")
        values = [_field(text, part, *field) for part, field in zip(parts, FIELDS, strict=True)]
        weekdays = frozenset(value % 7 for value in values[4])
        line = cls(
            text,
            tuple(sorted(values[0], reverse=True)),
            tuple(sorted(values[1], reverse=True)),
            values[2],
            values[3],
            weekdays,
            parts[2] != "*" and parts[4] != "*",
        )
        if line.last_before(datetime(2104, 12, 31, 23, 59)) is None:
            raise ValueError(f"{text!r} never comes: there is no such day")
        return line

    def last_before(self, local: datetime) -> datetime | None:
        """Return when the line fired last, at or before ``local``, a time without a zone; None if never."""
        day = local.date()
        for _ in range(LONGEST_DAYS):
            if self._is_day(day):
                for hour in self.hours:
                    for minute in self.minutes:
                        found = datetime(day.year, day.month, day.day, hour, minute)
                        if found <= local:
                            return found
            day -= timedelta(days=1)
        return None

    def _is_day(self, day: date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.is_either_day else by_month and by_week


def _field(text: str, part: str, what: str, low: int, high: int, names: Mapping[str, int]) -> frozenset[int]:
    found: set[int] = set()
    for item in part.split(","):
        span, slash, step_text = item.partition("/")
        first, dash, last = span.partition("-")
        try:
            step = int(step_text) if slash else 1
            if span == "*":
                start, end = low, high
            else:
                start = names[first] if first in names else int(first)
                end = (names[last] if last in names else int(last)) if dash else (high if slash else start)
        except ValueError:
            raise ValueError(f"{text!r} has {item!r} for its {what}, which cannot be read") from None
        if not (low <= start <= end <= high and step >= 1):
            raise ValueError(f"{text!r} has {item!r} for its {what}; it goes from {low} to {high}, upwards")
        found.update(range(start, end + 1, step))
    return frozenset(found)
