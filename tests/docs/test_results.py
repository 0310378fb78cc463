"""The results of the experiments in configs/: RESULTS.md holds what the files in configs/results say."""

import importlib.util
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECORDS = sorted((CONFIGS / "results").glob("*.json"))
SPEC = importlib.util.spec_from_file_location("results_run", CONFIGS / "results" / "run.py")
results = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results)


def test_the_table_is_current():
    written = (CONFIGS / "RESULTS.md").read_text(encoding="utf-8")
    assert written == results.table(), "run `python configs/results/run.py --table`"


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.stem)
def test_every_result_belongs_to_a_config_and_has_its_figure(file):
    record = json.loads(file.read_text(encoding="utf-8"))
    config = (CONFIGS / f"{file.stem}.py").read_text(encoding="utf-8")
    assert "def experiment(" in config
    figure = file.with_suffix(".svg").read_text(encoding="utf-8")
    assert figure == results.figure(record)
    ElementTree.fromstring(figure)


def test_all_experiments_together_take_less_than_eight_hours():
    assert sum(json.loads(file.read_text(encoding="utf-8"))["wall_seconds"] for file in RECORDS) < 8 * 3600
