"""Strict reading of config.json: an unknown field is an error, because it may change the model's output."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import (
    Activation,
    BandScaling,
    DynamicNtkScaling,
    LinearScaling,
    Rope,
    RopeScaling,
    SpecialIds,
    YarnScaling,
)
from jaxformer.errors import UserError

REQUIRED = object()

# Fields that do not change the model's output: metadata, training options and generation defaults.
NEUTRAL = frozenset(
    """
    _name_or_path architectures auto_map dtype torch_dtype transformers_version model_type use_cache return_dict
    output_attentions output_hidden_states gradient_checkpointing torchscript use_bfloat16 tokenizer_class
    problem_type id2label label2id task_specific_params finetuning_task pruned_heads chunk_size_feed_forward
    pretraining_tp _attn_implementation attn_implementation _sliding_window_pattern sliding_window_pattern
    cache_implementation initializer_range initializer_factor init_std initializer_cutoff_factor sep_token_id
    cls_token_id mask_token_id unk_token_id bad_words_ids begin_suppress_tokens suppress_tokens num_beams
    num_beam_groups max_length min_length length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    early_stopping do_sample temperature top_k top_p typical_p repetition_penalty diversity_penalty
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id prefix is_llama_config
    transformers.js_config _num_labels num_labels model_parallel classif_dropout classifier_dropout
    classifier_dropout_prob summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj qa_dropout max_window_layers output_past output_router_logits sparse_prediction
    sparse_pred_ignore_index deterministic_flash_attn reference_compile repad_logits_with_grad embedding_size n_ctx
    force_bos_token_to_be_generated save_step predict_special_tokens eos_token_ids xla_device directionality
    pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
    sentence_transformers sbert_ce_default_activation_function unsloth_version unsloth_fixed max_sequence_length
    """.split()  # noqa: SIM905 - a list literal would take seventy lines
)

ACTIVATIONS: Mapping[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


# Requirements on a value by the type of its default: a description and a check. ModelConfig checks ranges.
_KINDS: Mapping[type, tuple[str, Callable[[Any], bool]]] = {
    object: ("a number above 0", lambda value: _is_number(value) and value > 0),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a number", lambda value: _is_number(value)),
    float: ("a number", lambda value: _is_number(value)),
    str: ("a string", lambda value: isinstance(value, str)),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"'{path}' is not valid JSON ({error})") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read ({error.strerror})") from None
    if not isinstance(values, dict):
        raise UserError(f"'{path}' does not hold a JSON object")
    return values


class Fields:
    """The fields of one config.json; `finish` raises if a field outside `NEUTRAL` was never read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._seen, self.where = dict(values), set(NEUTRAL), where

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Return the value of a field, or the default if it is null or absent.

        The value must be a bool, a number or a string like the default; it is not checked if the default is None.
        A field without a default is required and must be a number above 0.
        """
        self._seen.add(name)
        value = self._values.get(name)
        if value is None and default is REQUIRED:
            raise UserError(f"{self.where}: field '{name}' is missing: this model cannot be built without it")
        if value is None:
            return default
        wanted, fits = _KINDS.get(type(default), ("", lambda value: True))
        if not fits(value):
            raise UserError(f"{self.where}: {name} = {value!r} must be {wanted}")
        return value

    def nullable(self, name: str, default: Any) -> Any:
        """Return the value of a field, which may be null; the default applies only if the field is absent."""
        self._seen.add(name)
        return self._values.get(name, default)

    def require(self, name: str, *allowed: Any) -> None:
        """Raise unless the value is one of `allowed`, the first of which is the default."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            shown = " or ".join(repr(a) for a in allowed)
            raise UserError(
                f"{self.where}: {name} = {value!r} is not supported: it changes the model's output; supported: {shown}"
            )

    def activation(self, name: str, default: str) -> Activation:
        value = self.take(name, default)
        if value not in ACTIVATIONS:
            raise UserError(f"{self.where}: {name} = {value!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def special_ids(self, vocab_size: int, **defaults: int) -> SpecialIds:
        """Return the token ids of bos, eos, pad and decoder start.

        An absent field has its default; a null or negative id means that there is no such token. Ids outside the
        vocabulary, which transformers accepts and tiny test models often have, are ignored with a warning.
        """
        kept: dict[str, tuple[int, ...]] = {}
        outside = []
        for name in ("bos", "eos", "pad", "decoder_start"):
            value = self.nullable(f"{name}_token_id", defaults.get(name))
            values = value if name == "eos" and isinstance(value, list) else [value]
            ids = [id for id in values if id is not None and id >= 0]
            kept[name] = tuple(id for id in ids if id < vocab_size)
            outside += [f"{name}_token_id = {id}" for id in ids if id >= vocab_size]
        if outside:
            warnings.warn(
                f"{self.where}: {', '.join(outside)} outside the vocabulary of {vocab_size} tokens: ignored",
                stacklevel=2,
            )
        single = {name: ids[0] for name, ids in kept.items() if name != "eos" and ids}
        return SpecialIds(eos=kept["eos"], **single)

    def finish(self) -> None:
        """Raise if a field was never read."""
        unread = sorted(name for name, value in self._values.items() if name not in self._seen and value is not None)
        if unread:
            shown = ", ".join(f"{name} = {self._values[name]!r}" for name in unread)
            raise UserError(f"{self.where}: unknown fields, which may change the model's output: {shown}")


# ---------------------------------------------------------------- RoPE
def read_rope(fields: Fields, context_length: int, theta: float = 10_000.0, layers: str | None = None) -> Rope:
    """Read RoPE from `rope_parameters`, or from the older fields `rope_theta` and `rope_scaling`.

    Args:
      layers: the key in `rope_parameters` if local and global layers have different RoPE, such as `full_attention`.
    """
    options = fields.take("rope_parameters", None)
    older = fields.take("rope_scaling", None)
    base = fields.take("rope_theta", theta)
    for name, value in (("rope_parameters", options), ("rope_scaling", older)):
        if not isinstance(value, dict | None):
            raise UserError(f"{fields.where}: {name} = {value!r} must be a JSON object")
    if options is None:
        options = dict(older or {})
    elif layers is not None and any(isinstance(value, dict) for value in options.values()):
        options = options.get(layers) or {}
    options = {name: value for name, value in options.items() if value is not None}
    kind = options.pop("rope_type", options.pop("type", "default"))
    options.pop("type", None)
    fraction = options.pop("partial_rotary_factor", fields.take("partial_rotary_factor", 1.0))
    base = options.pop("rope_theta", base)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UserError(f"{fields.where}: rope_type = {kind!r} is not supported; supported: {', '.join(_SCALINGS)}")
    try:
        scaling = _SCALINGS[kind](options, context_length)
    except KeyError as missing:
        raise UserError(f"{fields.where}: rope parameter {missing} is missing with rope_type '{kind}'") from None
    if options:
        raise UserError(f"{fields.where}: unknown rope parameters for rope_type {kind!r}: {options}")
    return Rope(theta=base, fraction=fraction, scaling=scaling)


def _no_scaling(options: dict[str, Any], context_length: int) -> None:
    options.pop("factor", None)


def _linear(options: dict[str, Any], context_length: int) -> RopeScaling:
    return LinearScaling(factor=options.pop("factor"))


def _dynamic(options: dict[str, Any], context_length: int) -> RopeScaling:
    original = options.pop("original_max_position_embeddings", context_length)
    return DynamicNtkScaling(factor=options.pop("factor"), original_length=original)


def _bands(options: dict[str, Any], context_length: int) -> RopeScaling:
    return BandScaling(
        factor=options.pop("factor"),
        low_factor=options.pop("low_freq_factor"),
        high_factor=options.pop("high_freq_factor"),
        original_length=options.pop("original_max_position_embeddings"),
    )


def _yarn(options: dict[str, Any], context_length: int) -> RopeScaling:
    original = options.pop("original_max_position_embeddings", context_length)
    return YarnScaling(
        factor=options.pop("factor"),
        original_length=original,
        fast_turns=options.pop("beta_fast", 32.0),
        slow_turns=options.pop("beta_slow", 1.0),
        magnitude=options.pop("attention_factor", None),
        whole_channels=options.pop("truncate", True),
    )


_SCALINGS = {"default": _no_scaling, "linear": _linear, "dynamic": _dynamic, "llama3": _bands, "yarn": _yarn}


def write_rope(rope: Rope) -> dict[str, Any]:
    """The inverse of `read_rope`."""
    fields: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.fraction != 1.0:
        fields["partial_rotary_factor"] = rope.fraction
    match rope.scaling:
        case LinearScaling(factor=factor):
            fields |= {"rope_type": "linear", "factor": factor}
        case DynamicNtkScaling(factor=factor, original_length=length):
            fields |= {"rope_type": "dynamic", "factor": factor, "original_max_position_embeddings": length}
        case BandScaling() as bands:
            fields |= {
                "rope_type": "llama3",
                "factor": bands.factor,
                "low_freq_factor": bands.low_factor,
                "high_freq_factor": bands.high_factor,
                "original_max_position_embeddings": bands.original_length,
            }
        case YarnScaling() as yarn:
            fields |= {
                "rope_type": "yarn",
                "factor": yarn.factor,
                "original_max_position_embeddings": yarn.original_length,
                "beta_fast": yarn.fast_turns,
                "beta_slow": yarn.slow_turns,
                "attention_factor": yarn.magnitude,
                "truncate": yarn.whole_channels,
            }
    return fields


# ---------------------------------------------------------------- writing
def write_activation(activation: Activation) -> str:
    """Return the name of an activation in current versions of transformers."""
    names = {"gelu_tanh": "gelu_pytorch_tanh"}
    return names.get(activation, activation)


def write_special_ids(special: SpecialIds) -> dict[str, Any]:
    eos: Any = list(special.eos) if len(special.eos) > 1 else (special.eos[0] if special.eos else None)
    return {"bos_token_id": special.bos, "eos_token_id": eos, "pad_token_id": special.pad}
