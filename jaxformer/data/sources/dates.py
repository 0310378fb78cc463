"""A synthetic sequence-to-sequence corpus: dates written in eight languages, paired with their ISO format.

Example i is a pure function of (split, i). Every text has exactly one meaning: a month's name means the same month in
all eight languages, and the separator determines the order of numbers, `day.month.year`, `day-month-year` or
`year/month/day`. Training and held-out days are disjoint.
"""

import datetime
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from jaxformer.config import DatesSource
from jaxformer.data.sources.split import is_heldout

FIRST_DAY = datetime.date(1900, 1, 1)
LAST_DAY = datetime.date(2099, 12, 31)


class Language(NamedTuple):
    """How a language writes dates; months and weekdays are strings of space-separated names."""

    months: str
    short_months: str
    weekdays: str  # starting with Monday
    ordinal: Callable[[int], str]
    formats: tuple[str, ...]


class Dates(Sequence[dict[str, str]]):
    """`num_examples` pairs of one split, generated lazily."""

    def __init__(self, cfg: DatesSource):
        self._cfg = cfg
        self._days = split_days(cfg.split, cfg.heldout_percent)

    def __len__(self) -> int:
        return self._cfg.num_examples

    def __getitem__(self, index: int) -> dict[str, str]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # A hash instead of a random generator, because its values are the same in every version of Python.
        draw = int.from_bytes(hashlib.sha256(f"{self._cfg.split} {index}".encode()).digest())
        draw, day = divmod(draw, len(self._days))
        draw, language = divmod(draw, len(LANGUAGES))
        formats = LANGUAGES[language].formats
        text = format_date(self._days[day], LANGUAGES[language], formats[draw % len(formats)])
        return {"inputs": text, "targets": self._days[day].isoformat()}


@cache
def split_days(split: str, heldout_percent: int) -> tuple[datetime.date, ...]:
    """Return the days of a split; the splits are disjoint."""
    days = map(datetime.date.fromordinal, range(FIRST_DAY.toordinal(), LAST_DAY.toordinal() + 1))
    return tuple(day for day in days if is_heldout(day.isoformat(), heldout_percent) == (split == "heldout"))


def format_date(day: datetime.date, language: Language, pattern: str) -> str:
    return pattern.format(
        d=day.day,
        dd=f"{day.day:02d}",
        m=day.month,
        mm=f"{day.month:02d}",
        y=day.year,
        nth=language.ordinal(day.day),
        month=language.months.split()[day.month - 1],
        mon=language.short_months.split()[day.month - 1],
        weekday=language.weekdays.split()[day.weekday()],
    )


def _english_ordinal(day: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{'th' if day in (11, 12, 13) else ending}"


def _first_only(first: str) -> Callable[[int], str]:
    """Ordinals of languages in which only the first day of a month has a special form."""
    return lambda day: first if day == 1 else str(day)


ENGLISH = Language(
    months="January February March April May June July August September October November December",
    short_months="Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec",
    weekdays="Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    ordinal=_english_ordinal,
    formats=(
        "{weekday}, {month} {d}, {y}",
        "{weekday} {nth} {month} {y}",
        "{month} {d}, {y}",
        "{d} {month} {y}",
        "{nth} of {month} {y}",
        "the {nth} of {month}, {y}",
        "{mon} {d}, {y}",
        "{d} {mon} {y}",
        "{y}/{mm}/{dd}",
    ),
)
GERMAN = Language(
    months="Januar Februar März April Mai Juni Juli August September Oktober November Dezember",
    short_months="Jan. Feb. März Apr. Mai Juni Juli Aug. Sept. Okt. Nov. Dez.",
    weekdays="Montag Dienstag Mittwoch Donnerstag Freitag Samstag Sonntag",
    ordinal=lambda day: f"{day}.",
    formats=(
        "{weekday}, {nth} {month} {y}",
        "{weekday}, den {nth} {month} {y}",
        "{nth} {month} {y}",
        "{nth} {mon} {y}",
        "{dd}.{mm}.{y}",
        "{d}.{m}.{y}",
    ),
)
FRENCH = Language(
    months="janvier février mars avril mai juin juillet août septembre octobre novembre décembre",
    short_months="janv. févr. mars avr. mai juin juil. août sept. oct. nov. déc.",
    weekdays="lundi mardi mercredi jeudi vendredi samedi dimanche",
    ordinal=_first_only("1er"),
    formats=(
        "{weekday} {nth} {month} {y}",
        "le {nth} {month} {y}",
        "{nth} {month} {y}",
        "{nth} {mon} {y}",
        "{dd}.{mm}.{y}",
    ),
)
SPANISH = Language(
    months="enero febrero marzo abril mayo junio julio agosto septiembre octubre noviembre diciembre",
    short_months="ene feb mar abr may jun jul ago sept oct nov dic",
    weekdays="lunes martes miércoles jueves viernes sábado domingo",
    ordinal=str,
    formats=(
        "{weekday}, {d} de {month} de {y}",
        "el {d} de {month} de {y}",
        "{d} de {month} de {y}",
        "{d} {mon} {y}",
        "{y}/{mm}/{dd}",
    ),
)
ITALIAN = Language(
    months="gennaio febbraio marzo aprile maggio giugno luglio agosto settembre ottobre novembre dicembre",
    short_months="gen feb mar apr mag giu lug ago set ott nov dic",
    weekdays="lunedì martedì mercoledì giovedì venerdì sabato domenica",
    ordinal=_first_only("1º"),
    formats=(
        "{weekday} {nth} {month} {y}",
        "{nth} {month} {y}",
        "{d} {month} {y}",
        "{d} {mon} {y}",
        "{d}.{m}.{y}",
    ),
)
PORTUGUESE = Language(
    months="janeiro fevereiro março abril maio junho julho agosto setembro outubro novembro dezembro",
    short_months="jan. fev. mar. abr. mai. jun. jul. ago. set. out. nov. dez.",
    weekdays="segunda-feira terça-feira quarta-feira quinta-feira sexta-feira sábado domingo",
    ordinal=_first_only("1º"),
    formats=(
        "{weekday}, {d} de {month} de {y}",
        "{nth} de {month} de {y}",
        "{d} de {month} de {y}",
        "{d} de {mon} de {y}",
        "{dd}-{mm}-{y}",
    ),
)
DUTCH = Language(
    months="januari februari maart april mei juni juli augustus september oktober november december",
    short_months="jan feb mrt apr mei jun jul aug sep okt nov dec",
    weekdays="maandag dinsdag woensdag donderdag vrijdag zaterdag zondag",
    ordinal=lambda day: f"{day}e",
    formats=(
        "{weekday} {d} {month} {y}",
        "{nth} {month} {y}",
        "{d} {month} {y}",
        "{d} {mon} {y}",
        "{dd}-{mm}-{y}",
        "{d}-{m}-{y}",
    ),
)
POLISH = Language(
    months="stycznia lutego marca kwietnia maja czerwca lipca sierpnia września października listopada grudnia",
    short_months="sty lut mar kwi maj cze lip sie wrz paź lis gru",
    weekdays="poniedziałek wtorek środa czwartek piątek sobota niedziela",
    ordinal=str,
    formats=(
        "{weekday}, {d} {month} {y}",
        "{d} {month} {y} r.",
        "dnia {d} {month} {y}",
        "{d} {mon} {y}",
        "{dd}.{mm}.{y}",
    ),
)

LANGUAGES = (ENGLISH, GERMAN, FRENCH, SPANISH, ITALIAN, PORTUGUESE, DUTCH, POLISH)
