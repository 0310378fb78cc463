"""Reads and writes generation_config.json, the file with a model's decoding defaults in Hugging Face directories.

The file keeps its format in run directories too. `GenerationDefaults` holds the fields and the equivalent
settings of `generate`. A field becomes a setting only if both mean exactly the same; other fields that change the
output are `unsupported`. As in transformers, decoding is greedy unless `do_sample` is true. A setting that the file
does not name has the default of `generate`: unlike in transformers, sampling then has no top_k of 50.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.config import ModelConfig
from jaxformer.convert.fields import read_json, write_special_ids
from jaxformer.errors import UserError

GENERATION_FILE = "generation_config.json"
ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")

# Fields that do not change the output: token ids, which the model config holds, the cache, the form of the results,
# compilation, and speculative decoding.
_NEUTRAL = frozenset(
    """
    bos_token_id eos_token_id pad_token_id decoder_start_token_id _from_model_config transformers_version _commit_hash
    use_cache cache_implementation cache_config max_cache_len low_memory compile_config disable_compile
    prefill_chunk_size continuous_batching_config output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate return_legacy_cache is_assistant num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit
    assistant_lookbehind target_lookbehind use_mtp remove_invalid_values trust_remote_code
    """.split()  # noqa: SIM905 - a list literal would take thirty lines
)
# Values that disable a field in transformers; None disables every field.
_OFF: Mapping[str, Any] = {
    "do_sample": False,
    "min_new_tokens": 0,
    "min_length": 0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": [],
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "sequence_bias": {},
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_return_sequences": 1,
    "renormalize_logits": False,
    "token_healing": False,
    "guidance_scale": 1,
}
# Fields whose values are also values of our settings.
_SETTINGS = {
    "max_new_tokens": "max_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
_SAMPLING_UNSUPPORTED = ("epsilon_cutoff", "eta_cutoff", "top_h")
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_BEAMS_UNSUPPORTED = ("num_beam_groups", "diversity_penalty", "renormalize_logits")
_EARLY_STOPPING = {True: "exact", False: "heuristic", "never": "never"}


@dataclass(frozen=True, eq=False)
class GenerationDefaults:
    """The decoding defaults of a model."""

    fields: Mapping[str, Any]
    """The content of the file."""
    settings: Mapping[str, Any]
    """Defaults of the settings of a request, by their names in `SamplingConfig`."""
    beams: Mapping[str, Any]
    """Defaults of num_beams, length_penalty and early_stopping; empty if the model does not use beam search."""
    unsupported: Mapping[str, Any]
    """Fields of the file that change the output in transformers but have no counterpart here."""


def read_generation_fields(directory: str | Path) -> dict[str, Any] | None:
    """Return the content of generation_config.json, or None if the directory has no such file."""
    path = Path(directory) / GENERATION_FILE
    return read_json(path) if path.is_file() else None


def read_generation_defaults(directory: str | Path, model: ModelConfig) -> GenerationDefaults | None:
    """Read the decoding defaults of the model in a run directory or a Hugging Face directory, if it has any."""
    fields = read_generation_fields(directory)
    if fields is None:
        return None
    try:
        return parse_generation_fields(fields, model)
    except UserError as error:
        raise UserError(f"'{Path(directory) / GENERATION_FILE}': {error}") from None


def parse_generation_fields(fields: Mapping[str, Any], model: ModelConfig) -> GenerationDefaults:
    """Translate the fields of a generation_config.json."""
    rest = {name: value for name, value in fields.items() if name not in _NEUTRAL and _is_on(name, value)}
    beams = _take_beams(rest)
    settings = _take_sampling(rest, bool(beams))
    settings |= {ours: rest.pop(theirs) for theirs, ours in _SETTINGS.items() if theirs in rest}
    settings |= _take_lengths(rest, settings, model)
    settings |= _take_forced_tokens(rest, model)
    settings |= _take_banned_tokens(rest, model)
    return GenerationDefaults(fields, settings, beams, rest)


def write_generation_fields(fields: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the content of generation_config.json for export, with the special ids of the model."""
    ids = write_special_ids(model.special) | {"decoder_start_token_id": model.special.decoder_start}
    kept = {name: value for name, value in fields.items() if name not in ID_FIELDS or ids[name] is not None}
    changed = {name: id for name, id in ids.items() if id is not None and _as_list(kept.get(name)) != _as_list(id)}
    return kept | changed


# ---------------------------------------------------------------- groups of fields
# Each function removes the fields that it translates from `rest`; what remains in the end is unsupported.
def _take_beams(rest: dict[str, Any]) -> dict[str, Any]:
    beams = {name: rest.pop(name) for name in _BEAMS if name in rest}
    if "num_beams" not in beams:
        for name in _BEAMS_UNSUPPORTED:
            rest.pop(name, None)  # without beams, they have no effect in transformers either
        return {}
    if "early_stopping" in beams:
        value = beams["early_stopping"]
        if not isinstance(value, bool | str) or value not in _EARLY_STOPPING:
            raise UserError(f'early_stopping = {value!r} must be true, false or "never"')
        beams["early_stopping"] = _EARLY_STOPPING[value]
    return beams


def _take_sampling(rest: dict[str, Any], has_beams: bool) -> dict[str, Any]:
    samples = rest.get("do_sample", False)
    if not isinstance(samples, bool):
        raise UserError(f"do_sample = {samples!r} must be true or false")
    settings = {name: rest.pop(name) for name in _SAMPLING if name in rest}
    if samples and not has_beams:
        del rest["do_sample"]
        return {"temperature": 1.0} | settings
    # Sampling in beam search is unsupported: `do_sample` stays in `rest`.
    for name in _SAMPLING_UNSUPPORTED:
        rest.pop(name, None)
    return {}


def _take_lengths(rest: dict[str, Any], settings: Mapping[str, Any], model: ModelConfig) -> dict[str, int]:
    """Translate max_length and min_length, which count the tokens that the decoder reads first.

    An encoder-decoder reads one, the decoder start token. A decoder-only model reads the prompt, whose length the file
    cannot know, so there they are unsupported."""
    taken = {}
    for name, ours in (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens")):
        if ours in settings:
            rest.pop(name, None)  # as in transformers, the number of new tokens takes precedence
        elif name in rest and model.shape == "encoder-decoder":
            value = rest.pop(name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"{name} = {value!r} must be an integer")
            taken[ours] = max(value - 1, 0)
    return taken


def _take_forced_tokens(rest: dict[str, Any], model: ModelConfig) -> dict[str, int]:
    taken = {}
    # transformers forces bos after a single token: that is the decoder start token, but rarely a whole prompt.
    if "forced_bos_token_id" in rest and model.shape == "encoder-decoder":
        taken["forced_first"] = rest.pop("forced_bos_token_id")
    last = _as_list(rest.get("forced_eos_token_id"))
    if len(last) == 1:
        del rest["forced_eos_token_id"]
        taken["forced_last"] = last[0]
    return taken


def _take_banned_tokens(rest: dict[str, Any], model: ModelConfig) -> dict[str, list[int]]:
    banned: set[int] = set()
    if "suppress_tokens" in rest:
        banned |= set(_token_ids("suppress_tokens", rest.pop("suppress_tokens")))
    if "bad_words_ids" in rest:
        value = rest.pop("bad_words_ids")
        if not isinstance(value, list):
            raise UserError(f"bad_words_ids = {value!r} must be a list of lists of token ids")
        words = [_token_ids("bad_words_ids", word) for word in value]
        # Like transformers, ignore a word that consists of eos alone.
        banned |= {word[0] for word in words if len(word) == 1 and word[0] not in model.special.eos}
        if longer := [word for word in words if len(word) > 1]:
            rest["bad_words_ids"] = longer
    return {"banned": sorted(banned)} if banned else {}


def _token_ids(name: str, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(id, int) and not isinstance(id, bool) for id in value):
        raise UserError(f"{name}: {value!r} must be a list of token ids")
    return value


def _is_on(name: str, value: Any) -> bool:
    return value is not None and not (name in _OFF and value == _OFF[name])


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
