"""`jaxformer --version`, alone and with details."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from jaxformer.cli import main


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxformer {version('jaxformer')}\n"


@pytest.mark.parametrize("options", [["--version", "-v"], ["-v", "--version"]])
def test_version_with_libraries_and_devices(options, capsys):
    assert main(options) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"jaxformer {version('jaxformer')}"
    assert [line.split()[0] for line in lines[:4]] == ["jax", "flax", "orbax-checkpoint", "Python"]
    assert lines[4:] == ["8 cpu devices"]


@pytest.mark.parametrize("arguments", [[], ["-v"], ["-v", "zoo"]])
def test_a_command_is_required_and_v_belongs_to_version(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_version_and_the_help_do_not_import_jax(option):
    script = f"import sys; from jaxformer.cli import main\ntry: main(['{option}'])\nexcept SystemExit: pass\n"
    script += "assert 'jax' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
