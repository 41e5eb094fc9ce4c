"""Cron expressions: five fields, from minute to weekday, in the local time of a zone.

`cronsim` parses them as Debian's cron does, and finds the matching times. It gets naive local times: a
schedule follows the wall clock, so the special cases for jobs in skipped or repeated hours do not apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from cronsim import CronSim, CronSimError

FIELDS = "minute, hour, day of month, month, weekday"


@dataclass(frozen=True, slots=True)
class CronExpression:
    """One cron expression."""

    text: str

    @classmethod
    def parse(cls, text: str) -> CronExpression:
        """Return the expression in ``text``, such as ``"30 8 * * mon-fri"``.

        Raises
        ------
        ValueError
            The text is not a cron expression, or no day matches it.
        """
        # cronsim also accepts six fields, with seconds
        if not isinstance(text, str) or len(text.split()) != 5:
            raise ValueError(f"{text!r} is not a cron expression; give five fields: {FIELDS}")
        line = cls(text)
        try:
            last = line.last_before(datetime(2104, 12, 31, 23, 59))
        except (CronSimError, ValueError) as error:
            raise ValueError(
                f'{text!r} is not a cron expression ({error}); give {FIELDS}, for example "30 8 * * mon-fri"'
            ) from None
        if last is None:
            raise ValueError(f"{text!r} matches no day; correct its day of month, month or weekday")
        return line

    def last_before(self, local: datetime) -> datetime | None:
        """Return the last match at or before ``local``, a time without a zone; None if 50 years have none."""
        ticks = CronSim(
            self.text, local.replace(second=0, microsecond=0) + timedelta(minutes=1), reverse=True
        )
        return next(ticks, None)
