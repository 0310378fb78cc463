"""Every pod config compiles for its topology, fits, and needs the memory that its docstring says."""

import re
from pathlib import Path

import pytest

from jaxformer.config.files import load_run_file
from jaxformer.preflight.compile import check_compiler
from jaxformer.preflight.report import preflight
from jaxformer.topology import parse_topology

PODS = sorted((Path(__file__).parents[2] / "configs" / "pods").glob("*.py"))


def marks(path: Path) -> list:
    is_gpu = parse_topology(load_run_file(path).mesh.topology).chip.platform == "gpu"
    return [pytest.mark.gpu_aot if is_gpu else pytest.mark.slow]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in PODS])
def test_pod_configs_fit(path):
    config = load_run_file(path)
    check_compiler(parse_topology(config.mesh.topology))
    report = preflight(config, None)
    assert report.fits
    written = re.search(r"peak ([\d.]+) GiB", path.read_text(encoding="utf-8"))
    assert written is not None, "the docstring says what preflight found"
    assert report.compiled.peak_bytes / 2**30 == pytest.approx(float(written[1]), rel=0.02)


@pytest.mark.parametrize("path", PODS, ids=lambda path: path.stem)
def test_pod_configs_are_named_after_their_topology(path):
    config = load_run_file(path)
    name = config.mesh.topology.replace("h100-", "h100x").replace("v4-", "v4_").replace("-", "")
    assert path.stem.endswith(name)
    assert f"jaxformer preflight configs/pods/{path.name}" in path.read_text(encoding="utf-8")
