"""Finding a model's files: local directories, the Hub's cache without a network, and error messages."""

import os
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from jaxformer.convert import hub
from jaxformer.convert.hub import local_directory
from jaxformer.errors import UserError

COMMIT, OLD_COMMIT = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """A temporary Hub cache in offline mode: one repository with two commits, a branch and a tag."""
    path = tmp_path / "home" / "hub"
    repository = path / "models--org--some-name.v2"
    for commit, content in ((COMMIT, "new"), (OLD_COMMIT, "old")):
        blob, snapshot = repository / "blobs" / content, repository / "snapshots" / commit
        blob.parent.mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        blob.write_text(content)
        (snapshot / "config.json").symlink_to(blob)
    for reference, commit in (("main", COMMIT), ("v1.0", OLD_COMMIT)):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return path


# ---------------------------------------------------------------- success
def test_local_directory_is_returned_unchanged(tmp_path):
    assert local_directory(tmp_path) == local_directory(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("address", "content"),
    [
        ("hf://org/some-name.v2", "new"),
        ("hf://org/some-name.v2@main", "new"),
        ("hf://org/some-name.v2@v1.0", "old"),
        (f"hf://org/some-name.v2@{OLD_COMMIT}", "old"),
        (Path("hf://org/some-name.v2"), "new"),
    ],
)
def test_cache_works_offline(cache, address, content):
    assert (local_directory(address) / "config.json").read_text() == content


def test_hf_home_sets_the_cache(cache):
    script = "from jaxformer.convert.hub import local_directory; print(local_directory('hf://org/some-name.v2'))"
    environment = os.environ | {"HF_HOME": str(cache.parent), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert Path(result.stdout.strip()) == cache / "models--org--some-name.v2" / "snapshots" / COMMIT


def test_only_supported_files_are_fetched(monkeypatch, tmp_path):
    call = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: call.update(options, name=name) or tmp_path)
    assert local_directory("hf://org/name@v1") == tmp_path
    assert (call.pop("name"), call.pop("revision")) == ("org/name", "v1")
    ours = ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    ours += ["spiece.model", "source.spm", "merges.txt", "vocab.txt", "vocab.json", "chat_template.jinja"]
    others = ["pytorch_model.bin", "model.pt", "modeling.py", "README.md", "onnx/config.json", "tf_model.h5"]
    others += ["original/consolidated.00.pth", "consolidated.safetensors", "training_args.bin", "model.gguf"]
    assert list(filter_repo_objects(ours + others, **call)) == ours


# ---------------------------------------------------------------- errors
def test_no_such_directory(tmp_path):
    with pytest.raises(UserError, match=r"nowhere' does not exist: correct the path, or write hf://org/name"):
        local_directory(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file' is a file: name the directory"):
        local_directory(tmp_path / "file")


@pytest.mark.parametrize(
    "address",
    ["hf://name", "hf://", "hf:name", "hf://a/b/c", "hf://a/b@", "hf://a b/c", "hf:///a/b", "hf://é/b", "hf://a/b@ x"],
)
def test_bad_addresses(address):
    with pytest.raises(
        UserError, match=r"is not an address of a Hub repository: write hf://org/name or hf://org/name@revision"
    ):
        local_directory(address)


@pytest.mark.parametrize("address", ["hf://org/other", "hf://org/some-name.v2@v2", f"hf://org/some-name.v2@{'c' * 40}"])
def test_not_in_the_cache(cache, address):
    with pytest.raises(
        UserError, match=rf"'{address}' is missing from the local.*unset HF_HUB_OFFLINE, or set HF_HOME"
    ):
        local_directory(address)


def _http(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
    return kind("first line\nsecond line", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_http(errors.GatedRepoError, 403), r"is gated: ask for access at https://huggingface.co/org/name, then"),
        (_http(errors.RepositoryNotFoundError, 404), r"does not exist or is private"),
        (_http(errors.RepositoryNotFoundError, 401), r"does not exist or is private"),
        (_http(errors.RevisionNotFoundError, 404), r"has no revision 'v9': name a branch, a tag or a commit"),
        (_http(errors.HfHubHTTPError, 401), r"cannot be read with your account: run hf auth login"),
        (_http(errors.DisabledRepoError, 403), r"cannot be read with your account"),
        (_http(errors.HfHubHTTPError, 500), r"could not be fetched, try again: HfHubHTTPError: first line$"),
        (errors.LocalEntryNotFoundError("gone"), r"is missing from the local cache.*\(LocalEntryNotFoundError: gone\)"),
        (
            errors.IncompleteSnapshotError("one file missing", "x"),
            r"is missing from the local cache or incomplete.*one file missing",
        ),
        (errors.HFValidationError("too long"), r"is not a valid repository name: HFValidationError: too long"),
        (httpx2.ConnectError("no route"), r"could not be fetched, try again: ConnectError: no route"),
        (OSError("disk full"), r"could not be fetched, try again: OSError: disk full"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_the_hub(monkeypatch, error, message):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(UserError, match="'hf://org/name@v9' " + message):
        local_directory("hf://org/name@v9")
