"""What all builders share; a builder is a function that makes a `ModelConfig` from a few sizes and options.

A parameter has the same name and meaning in every builder that takes it:

* `num_layers`, `embed_dim`, `vocab_size`: sizes of the model; `num_layers` is that of each stack.
* `num_heads`, `num_kv_heads`, `head_dim`: sizes of attention. `num_kv_heads` defaults to `num_heads`. If `head_dim` is
  None, it is `embed_dim / num_heads`; families whose published models have another value default to that value.
* `mlp_dim`: channels of the hidden layer of an MLP or expert.
* `num_decoder_layers`, `num_decoder_heads`, `decoder_mlp_dim`: of an encoder-decoder; default to those of the encoder.
  `source_vocab_size`: number of ids of the source, if it has its own embedding table.
* `context_length`: maximum sequence length in tokens. None: no limit, or that of `position`.
* `tied`: whether the token embeddings are also the output projection. `special`: ids of special tokens.
* `dropout`: rate after the embeddings and each sub-layer. `attention_dropout`: rate of the attention probabilities.
* `num_classes`: build a classifier of texts with this many classes. `num_tags`: build a classifier of tokens, a tagger.
  Neither has logits over the vocabulary, unless `masked_lm` is true. `labels`: names of the classes or tags; by default
  those of the training data. `problem`: kind of classification. `classifier_dropout`: rate before the classifier.
* `masked_lm`: whether an encoder has a masked-LM head; by default it has one unless it is a classifier or a tagger.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer.config import ModelConfig, PoolerConfig, Problem, TransformConfig
from jaxformer.errors import UserError

Builder = Callable[..., ModelConfig]

RENAMED = {"max_length": "context_length"}
"""Former parameter names, which all builders still accept, and the current ones."""


def builder(extends: Builder | None = None, without: Sequence[str] = ()) -> Callable[[Builder], Builder]:
    """Decorate a builder: it accepts former parameter names, and its signature lists all parameters.

    Args:
      extends: the builder that gets the `**options` of this one.
      without: parameters of `extends` that this builder sets itself.
    """

    def decorate(build: Builder) -> Builder:
        @functools.wraps(build)
        def call(**options: Any) -> ModelConfig:
            return build(**_with_current_names(build.__name__, options))

        call.__signature__ = _full_signature(build, extends, without)
        return call

    return decorate


def attention_sizes(
    embed_dim: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
) -> dict[str, Any]:
    """The size fields of an `AttentionConfig`; raise if `head_dim` is None and heads do not divide `embed_dim`."""
    if head_dim is None and num_heads > 0:
        if embed_dim % num_heads:
            raise UserError(
                f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}: change one of them or set head_dim"
            )
        head_dim = embed_dim // num_heads
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}


def class_head(
    num_classes: int | None,
    num_tags: int | None,
    labels: Sequence[str],
    problem: Problem,
    *,
    classes: Mapping[str, Any],
    tags: Mapping[str, Any],
) -> PoolerConfig | None:
    """The head of a classifier or tagger; None if the model is neither.

    Args:
      classes, tags: the fields of `PoolerConfig` that the family sets for a classifier and for a tagger.
    """
    if num_classes is not None and num_tags is not None:
        raise UserError(f"num_classes={num_classes} and num_tags={num_tags}: set only one, a model has one class head")
    if num_tags is not None:
        return PoolerConfig(pooling="none", num_classes=num_tags, labels=tuple(labels), problem=problem, **tags)
    if num_classes is not None:
        return PoolerConfig(num_classes=num_classes, labels=tuple(labels), problem=problem, **classes)
    if labels:
        raise UserError(f"labels={list(labels)} without classes: set num_classes or num_tags")
    return None


def decoder_class_head(
    num_classes: int | None, num_tags: int | None, labels: Sequence[str], problem: Problem, dropout: float | None
) -> PoolerConfig | None:
    """The head of a decoder that classifies by its last token, or tags its tokens; None if the model does neither.

    Args:
      dropout: None means 0.0 for a classifier and 0.1 for a tagger, the defaults of transformers.
    """
    return class_head(
        num_classes,
        num_tags,
        labels,
        problem,
        classes={"pooling": "last", "bias": False, "dropout": dropout or 0.0},
        tags={"dropout": 0.1 if dropout is None else dropout},
    )


def source_class_head(
    num_classes: int | None, labels: Sequence[str], problem: Problem, dropout: float
) -> PoolerConfig | None:
    """The head of an encoder-decoder that classifies by the last token of its decoder; None if it does not classify."""
    dense = TransformConfig(activation="tanh")
    classes = {"pooling": "last", "transform": dense, "dropout": dropout}
    return class_head(num_classes, None, labels, problem, classes=classes, tags={})


def _with_current_names(name: str, options: dict[str, Any]) -> dict[str, Any]:
    for former in options.keys() & RENAMED.keys():
        current = RENAMED[former]
        if current in options:
            raise UserError(f"{name}: {former} is the former name of {current}: remove {former}")
        # FutureWarning, because Python hides a DeprecationWarning from the authors of config files.
        warnings.warn(f"{name}: {former} is now called {current}: rename it", FutureWarning, stacklevel=3)
        options = {RENAMED.get(key, key): value for key, value in options.items()}
    return options


def _full_signature(build: Builder, extends: Builder | None, without: Sequence[str]) -> inspect.Signature:
    """The signature with the parameters of `extends` in place of `**options`."""
    signature = inspect.signature(build)
    if extends is None:
        return signature
    own = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
    inherited = {name: p for name, p in inspect.signature(extends).parameters.items() if name not in without}
    # As in a subclass: inherited parameters keep their place, and an own definition replaces the inherited one.
    return signature.replace(parameters=list((inherited | own).values()))
