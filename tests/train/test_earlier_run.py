"""A run directory written before config.json had a version: it loads, and resumes with its unchanged Python config.

`earlier_run/run` was written by version 0.1.0 after 2 of 6 steps, `six_steps.jsonl` is what that version logged when
it continued to 6. Do not regenerate them: they are what users have on their disks.
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


def test_it_loads_and_decodes(workdir):
    run = load(workdir)
    assert run.step == 2
    assert [metric.kind for metric in run.config.evaluate.metrics] == ["perplexity", "exact_match"]
    assert len(generate(run, ["number 3"], max_new_tokens=4)) == 1


def test_it_resumes_as_the_version_that_wrote_it_would_have(workdir):
    config = load_run_file(EARLIER / "config.py", ["train.steps=6", f"workdir={workdir}"])
    train(config.replace(mesh=MeshConfig(data=-1)), Console(quiet=True))
    wanted, found = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (EARLIER / "six_steps.jsonl", workdir / "metrics.jsonl")
    )
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for old, new in zip(wanted, found, strict=True):
        assert ("heldout_loss" in old) == ("heldout_loss" in new)
        for name in {"loss", "grad_norm", "learning_rate", "param_norm", "heldout_loss"} & old.keys():
            assert new[name] == pytest.approx(old[name], rel=1e-5), (old["step"], name)
    assert json.loads((workdir / "config.json").read_text())["version"] == 1
