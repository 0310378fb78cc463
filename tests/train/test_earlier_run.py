"""A run directory written before config.json had a version loads, and resumes with its unchanged Python config.

Version 0.1.0 wrote `earlier_run/run` after 2 of 6 steps, and logged `six_steps.jsonl` when it continued to step 6. Do
not regenerate these files: they stand for the runs that users have on disk.
"""

import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from jaxformer import generate, load
from jaxformer.config import MeshConfig, load_run_file
from jaxformer.train.loop import train

EARLIER = Path(__file__).parent / "earlier_run"


@pytest.fixture
def workdir(tmp_path) -> Path:
    return Path(shutil.copytree(EARLIER / "run", tmp_path / "run"))


def test_an_earlier_run_loads_and_decodes(workdir):
    run = load(workdir)
    assert run.step == 2
    assert [metric.kind for metric in run.config.evaluate.metrics] == ["perplexity", "exact_match"]
    assert len(generate(run, ["number 3"], max_new_tokens=4)) == 1


def test_an_earlier_run_resumes_with_the_metrics_of_its_version(workdir):
    config = load_run_file(EARLIER / "config.py", ["train.steps=6", f"workdir={workdir}"])
    train(config.replace(mesh=MeshConfig(data=-1)), Console(quiet=True))
    expected, actual = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (EARLIER / "six_steps.jsonl", workdir / "metrics.jsonl")
    )
    assert [line["step"] for line in actual] == [1, 2, 3, 4, 5, 6]
    for old, new in zip(expected, actual, strict=True):
        assert ("heldout_loss" in old) == ("heldout_loss" in new)
        for name in {"loss", "grad_norm", "learning_rate", "param_norm", "heldout_loss"} & old.keys():
            assert new[name] == pytest.approx(old[name], rel=1e-5), (old["step"], name)
    assert json.loads((workdir / "config.json").read_text())["version"] == 1
