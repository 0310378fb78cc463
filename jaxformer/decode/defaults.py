"""The settings of a request or a beam search, completed with the defaults in the model's generation_config.json.

A setting that is None gets the model's default, or that of `SamplingConfig` if the model has none. `complete` and
`stream` never use beam search, so num_beams in the file applies to `generate` and `search` only.
"""

import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from jaxformer import hosts
from jaxformer.convert.generation import GENERATION_FILE, GenerationDefaults
from jaxformer.decode.beam_search import BeamSearchConfig
from jaxformer.decode.sampling import SAMPLING_ONLY, SamplingConfig, make_sampling_config
from jaxformer.decode.text import sampleable_vocab_size
from jaxformer.errors import UserError
from jaxformer.run import Run

MAX_INT32 = 2**31 - 1

log = logging.getLogger(__name__)
_announced: WeakSet[GenerationDefaults] = WeakSet()


def complete_settings(run: Run, settings: Mapping[str, Any], beams: BeamSearchConfig | None = None) -> dict[str, Any]:
    """Return the settings of a request, with the model's defaults for those that are missing or None."""
    given = {name: value for name, value in settings.items() if value is not None}
    if run.generation is None:
        return given
    announce_defaults(run.generation)
    defaults = _default_settings(run)
    if beams is not None:
        defaults = {name: value for name, value in defaults.items() if name not in SAMPLING_ONLY}
    complete = defaults | given
    if "min_new_tokens" in complete and "min_new_tokens" not in given:
        # The model's minimum must not make a lower maximum of the caller an error.
        limit = complete.get("max_new_tokens", SamplingConfig.max_new_tokens)
        complete["min_new_tokens"] = min(complete["min_new_tokens"], limit)
    return complete


def complete_beams(run: Run, settings: Mapping[str, Any]) -> BeamSearchConfig:
    """Make the config of a beam search, with the model's defaults for settings that are missing or None."""
    defaults = {} if run.generation is None else run.generation.beams
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return BeamSearchConfig(**{"num_beams": 1, **defaults, **given})
    except UserError as error:
        is_given = str(error).partition("=")[0] in given
        raise (error if is_given else _file_error(error)) from None


def announce_defaults(defaults: GenerationDefaults) -> None:
    """Log the defaults, once for every model that is loaded."""
    if defaults in _announced:
        return
    _announced.add(defaults)
    message = describe_defaults(defaults)
    if message and hosts.is_main():
        log.warning("%s", message)


def describe_defaults(defaults: GenerationDefaults) -> str:
    """Say in one line which defaults the file sets, and which of its fields have no effect."""
    parts = []
    if values := {**defaults.settings, **defaults.beams}:
        parts.append(f"defaults from {GENERATION_FILE}: {_format(values)} (arguments override them)")
    if defaults.unsupported:
        parts.append(f"fields of {GENERATION_FILE} that are not supported and have no effect: "
                     f"{_format(defaults.unsupported)}")  # fmt: skip
    return "; ".join(parts)


def _default_settings(run: Run) -> dict[str, Any]:
    settings = dict(run.generation.settings)
    if "banned" in settings:
        # Ids above the tokenizer's are never sampled, so banning them has no effect.
        settings["banned"] = [id for id in settings["banned"] if id < sampleable_vocab_size(run)]
    try:
        # min_new_tokens of the file may exceed the default max_new_tokens; it is checked against the file's own only.
        make_sampling_config({"max_new_tokens": MAX_INT32, **settings})
    except UserError as error:
        raise _file_error(error) from None
    return settings


def _file_error(error: UserError) -> UserError:
    return UserError(f"{GENERATION_FILE}: {error}: correct the file in the model's directory")


def _format(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shorten(value)}" for name, value in values.items())


def _shorten(value: Any) -> str:
    return f"[{len(value)} entries]" if isinstance(value, list) and len(value) > 8 else repr(value)
