"""Run directories: paths in object stores, atomic writes, and writing by the main process only."""

import pytest

from jaxformer import hosts
from jaxformer.checkpoint import _absolute
from jaxformer.errors import UserError
from jaxformer.rundir import RunDir, new_directory, write_file


def test_object_store_paths_are_unchanged():
    """pathlib would turn gs://bucket into gs:/bucket, relative to the current directory."""
    run_dir = RunDir("gs://bucket/runs/a")
    assert str(run_dir.metrics) == "gs://bucket/runs/a/metrics.jsonl"
    assert str(_absolute(run_dir.checkpoints)) == "gs://bucket/runs/a/checkpoints"
    run_dir.check_writable()


def test_relative_paths_become_absolute_for_checkpoints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(_absolute(RunDir("runs/a").checkpoints)) == str(tmp_path / "runs" / "a" / "checkpoints")


def test_files_are_replaced_atomically(tmp_path, monkeypatch):
    write_file(tmp_path / "a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(type(RunDir(tmp_path).path), "replace", _fail)
        with pytest.raises(OSError, match="full"):
            write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    write_file(tmp_path / "a", b"new")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"new"}


def _fail(*args):
    raise OSError("disk full")


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(hosts, "is_main", lambda: False)
    write_file(tmp_path / "a", b"x")
    RunDir(tmp_path / "run").make()
    RunDir(tmp_path).write_evaluation(1, {"loss": 2.0})
    assert not list(tmp_path.iterdir())


def test_new_directories_are_created_atomically(tmp_path):
    with pytest.raises(ZeroDivisionError):
        _interrupted_directory(tmp_path / "deep" / "run")
    assert not list(tmp_path.iterdir())
    with new_directory(tmp_path / "run") as partial:
        (partial / "file").write_text("x")
        assert not (tmp_path / "run").exists()
    assert (tmp_path / "run" / "file").read_text() == "x"
    with pytest.raises(UserError, match="exists and is not empty"), new_directory(tmp_path / "run"):
        pass


def _interrupted_directory(path) -> None:
    with new_directory(path) as partial:
        (partial / "file").write_text("x")
        raise ZeroDivisionError


def test_collective_functions_with_one_process():
    assert hosts.any_process(True)
    assert not hosts.any_process(False)
    assert (hosts.process_index(), hosts.process_count()) == (0, 1)
    hosts.wait_for_all("here")
