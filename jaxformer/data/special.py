"""Which ids open and close texts: what the model says, and what its tokenizer says where the model is silent.

Training and decoding ask here, so that a model is asked to continue what it was trained on.
"""

from typing import NamedTuple

from jaxformer.config import ModelConfig
from jaxformer.data.tokenizer import Tokenizer


class SpecialTokens(NamedTuple):
    bos: int | None
    start: int | None  # what the decoder of an encoder-decoder reads first
    eos: tuple[int, ...]  # any of them ends a text; the first is the one trained on


def special_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> SpecialTokens:
    given = model.special
    bos = given.bos if given.bos is not None or tokenizer is None else tokenizer.bos_id
    start = bos if given.decoder_start is None else given.decoder_start
    return SpecialTokens(bos, start, given.eos or (() if tokenizer is None else (tokenizer.eos_id,)))
