"""Finds a model's files: in a local directory, or in a Hugging Face Hub repository, which is downloaded to the cache.

The environment variables `HF_HOME` and `HF_HUB_OFFLINE` and the token of `hf auth login` apply as usual.
"""

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxformer.errors import UserError

# No pickles (.bin, .pt): loading them can run code.
READ = ("*.json", "*.safetensors", "*.model", "*.spm", "merges.txt", "vocab.*", "chat_template.jinja")
# Subdirectories and Mistral's consolidated files hold copies of the weights for other programs.
IGNORED = ("*/*", "consolidated*.safetensors")
# One slash is accepted too: pathlib.Path turns `hf://` into `hf:/`.
REPOSITORY = re.compile(r"hf:/{1,2}(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


def local_directory(path: str | Path) -> Path:
    """Return the path of a local directory, or of the downloaded `hf://org/name` or `hf://org/name@revision`."""
    if str(path).startswith("hf:"):
        return _download(str(path))
    if not Path(path).exists():
        raise UserError(f"'{path}' does not exist: correct the path, or write hf://org/name to fetch from the Hub")
    if not Path(path).is_dir():
        raise UserError(f"'{path}' is a file: name the directory that holds it")
    return Path(path)


def _download(address: str) -> Path:
    match = REPOSITORY.fullmatch(address)
    if match is None:
        raise UserError(
            f"'{address}' is not an address of a Hub repository: write hf://org/name or hf://org/name@revision"
        )
    try:
        path = snapshot_download(
            match["name"], revision=match["revision"], allow_patterns=list(READ), ignore_patterns=list(IGNORED)
        )
    # The order matters: GatedRepoError is a RepositoryNotFoundError, and both are HTTP errors.
    except GatedRepoError:
        raise UserError(
            f"'{address}' is gated: ask for access at https://huggingface.co/{match['name']}, then run hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"'{address}' does not exist or is private: correct the name, or run hf auth login for a private one"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"'{address}' has no revision '{match['revision']}': name a branch, a tag or a commit"
        ) from None
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"'{address}' is missing from the local cache or incomplete, and the Hub cannot be reached: "
            f"go online, unset HF_HUB_OFFLINE, or set HF_HOME to the directory of the cache ({_first_line(error)})"
        ) from None
    except HFValidationError as error:
        raise UserError(f"'{address}' is not a valid repository name: {_first_line(error)}") from None
    except HfHubHTTPError as error:
        raise _http_error(address, error) from None
    except (HTTPError, OSError) as error:
        raise UserError(f"'{address}' could not be fetched, try again: {_first_line(error)}") from None
    return Path(path)


def _http_error(address: str, error: HfHubHTTPError) -> UserError:
    if error.response is not None and error.response.status_code in (401, 403):
        return UserError(f"'{address}' cannot be read with your account: run hf auth login ({_first_line(error)})")
    return UserError(f"'{address}' could not be fetched, try again: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
