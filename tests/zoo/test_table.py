"""The zoo table is complete, its parity is within bounds, and jaxformer/README.md has the current table."""

import re
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from jaxformer.convert import FORMATS, SAMPLES
from jaxformer.models import FAMILIES, PRESETS
from jaxformer.zoo import table

README = Path(__file__).parents[2] / "jaxformer" / "README.md"
UPDATE = "run `jaxformer zoo --measure --markdown` and put its output between the zoo comments in jaxformer/README.md"


def test_the_readme_has_the_current_table():
    shown = re.search(r"<!-- zoo -->\n(.*)\n<!-- /zoo -->", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None, "jaxformer/README.md lacks the comments <!-- zoo --> and <!-- /zoo -->"
    assert shown[1] == table.markdown(), UPDATE


def test_every_preset_and_every_sample_is_in_one_row():
    presets = Counter(name for row in table.rows() for name in row.presets)
    samples = Counter(name for row in table.rows() for name in row.samples)
    assert presets == Counter(list(PRESETS))
    assert samples == Counter(list(SAMPLES))


def test_every_family_and_every_format_has_a_row():
    shown = {row.title for row in table.rows()}
    assert all(row.title in shown for family in FAMILIES.values() for row in family.ZOO_ROWS)
    assert {SAMPLES[name].model_type for row in table.rows() for name in row.samples} == set(FORMATS)


def test_every_shape_has_a_row_for_each_of_its_objectives():
    shown = {row.title: table.objectives(row) for row in table.rows()}
    assert shown["Elman RNN, LSTM"] == ["causal", "classify", "tag"]
    assert shown["Vaswani et al. 2017"] == shown["BART"] == ["seq2seq", "span", "ul2", "infill", "classify"]
    assert shown["BERT"] == ["masked", "classify", "tag"]
    assert shown["Qwen3"] == ["causal", "prefix", "classify", "tag"]


def test_parity_is_recorded_for_every_sample_and_within_bounds():
    record = table.read_record()
    assert set(record["parity"]) == set(SAMPLES), UPDATE
    for name, parity in record["parity"].items():
        assert 0 < parity["max_delta"] < 1e-4, f"{name}: {parity}"
        assert parity["kl"] is None or 0 <= parity["kl"] < 1e-9, f"{name}: {parity}"
        assert parity["round_trip"], name


def test_the_terminal_shows_every_row():
    console = Console(width=400)
    with console.capture() as captured:
        table.show(console)
    text = captured.get()
    assert all(row.title in text for row in table.rows())
    assert "gpt2-124m" in text


def test_a_terminal_of_80_columns_breaks_no_word():
    console = Console(width=80)
    with console.capture() as captured:
        table.show(console)
    shown = set(captured.get().replace(",", " ").split())
    rows = table.rows()
    assert {objective for row in rows for objective in table.objectives(row)} <= shown
    assert {SAMPLES[name].model_type for row in rows for name in row.samples} <= shown
    assert {"encoder-decoder", "decoder-only", "encoder-only", "ModernBERT", "objectives"} <= shown


@pytest.mark.parametrize(
    ("count", "shown"), [(124_439_808, "124M"), (999_885_952, "1B"), (1_557_611_200, "1.56B"), (999_000_000, "999M")]
)
def test_counts_are_rounded_to_three_digits(count, shown):
    assert table._format_count(count) == shown
