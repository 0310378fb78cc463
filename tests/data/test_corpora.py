"""The built-in corpora: disjoint splits, and dates whose text is unambiguous."""

import datetime
import re
import sysconfig
from pathlib import Path

import pytest

from jaxformer.config import DatesSource, StdlibSource
from jaxformer.data import open_source
from jaxformer.data.sources.dates import LANGUAGES, format_date, split_days
from jaxformer.data.sources.stdlib import library_files, open_stdlib, split_files
from jaxformer.errors import UserError

STDLIB = Path(sysconfig.get_paths()["stdlib"])


# ---------------------------------------------------------------- standard library
def test_stdlib_split_is_disjoint_and_complete():
    train, heldout = (split_files(STDLIB, StdlibSource(split=split)) for split in ("train", "heldout"))
    assert set(train).isdisjoint(heldout)
    assert sorted(train + heldout) == library_files(STDLIB)
    assert len(train) > 300
    assert 0.02 < len(heldout) / len(train) < 0.10


def test_stdlib_leaves_out_tests_and_packages():
    names = library_files(STDLIB)
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    unwanted = re.compile(r"(^|/)(tests?|idle_test|site-packages|__pycache__)/|_sysconfigdata")
    assert [name for name in names if unwanted.search(name)] == []


def test_stdlib_split_depends_on_the_relative_path_only(tmp_path):
    for name in library_files(STDLIB):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    cfg = StdlibSource(split="heldout")
    assert split_files(tmp_path, cfg) == split_files(STDLIB, cfg)


def test_stdlib_reads_declared_encodings_and_skips_undecodable_files(tmp_path, monkeypatch):
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (tmp_path / "bad.py").write_bytes(b"name = '\xff'\n")
    (tmp_path / "blank.py").write_bytes(b"\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    texts = [
        example["text"]
        for split in ("train", "heldout")
        if (files := split_files(tmp_path, StdlibSource(split=split))) and "latin.py" in files
        for example in open_stdlib(StdlibSource(split=split))
    ]
    assert texts == ["# -*- coding: latin-1 -*-\nname = 'é'\n"]


def test_stdlib_without_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(UserError, match="found no Python source under"):
        open_source(StdlibSource())


# ---------------------------------------------------------------- dates
def test_dates_are_a_pure_function_of_split_and_index():
    short, long = (open_source(DatesSource(num_examples=n)) for n in (10, 500))
    assert [short[i] for i in reversed(range(10))] == [long[i] for i in reversed(range(10))]
    assert short[0] == {"inputs": "11 giugno 2020", "targets": "2020-06-11"}  # changes only if the corpus does
    assert len(list(short)) == 10


def test_heldout_days_never_appear_in_training():
    train = {example["targets"] for example in open_source(DatesSource(num_examples=5000))}
    heldout = {example["targets"] for example in open_source(DatesSource(num_examples=5000, split="heldout"))}
    assert train.isdisjoint(heldout)
    days = [set(split_days(split, 10)) for split in ("train", "heldout")]
    assert days[0].isdisjoint(days[1])
    assert len(days[0] | days[1]) == 73_049  # 1900 to 2099
    assert 0.09 < len(days[1]) / 73_049 < 0.11


def test_date_texts_are_unambiguous():
    meanings: dict[str, set[str]] = {}
    days = [datetime.date(2024, 1, 1) + datetime.timedelta(n) for n in range(366)]
    days += [day.replace(year=1924) for day in days]
    for language in LANGUAGES:
        for pattern in language.formats:
            for day in days:
                meanings.setdefault(format_date(day, language, pattern).lower(), set()).add(day.isoformat())
    assert {text: iso for text, iso in meanings.items() if len(iso) > 1} == {}


def test_languages_are_complete():
    assert len(LANGUAGES) == 8
    for language in LANGUAGES:
        assert len(set(language.months.split())) == 12
        assert len(set(language.short_months.split())) == 12
        assert len(set(language.weekdays.split())) == 7
        assert len(language.formats) >= 5


@pytest.mark.parametrize(
    ("day", "expected"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st")],
)
def test_english_ordinals(day, expected):
    assert format_date(datetime.date(1987, 3, day), LANGUAGES[0], "{nth}") == expected


def test_written_weekday_and_leading_zeros():
    day = datetime.date(1987, 3, 5)
    assert format_date(day, LANGUAGES[1], "{weekday}, den {nth} {month} {y}") == "Donnerstag, den 5. März 1987"
    assert format_date(day, LANGUAGES[1], "{dd}.{mm}.{y} {d}.{m}.{y}") == "05.03.1987 5.3.1987"
