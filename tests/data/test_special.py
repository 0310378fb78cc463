"""Special ids come from the model, or else from its tokenizer, and are the same in training and in decoding."""

import numpy as np
import pytest

from jaxformer.config import DataConfig, MemorySource, RunConfig, Seq2Seq, SpecialIds
from jaxformer.data import Bytes, build_set
from jaxformer.data.tokenizer import special_ids
from jaxformer.errors import UserError
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.vaswani import vaswani
from jaxformer.objectives import make_objective

SHAPE = {"num_layers": 1, "embed_dim": 8, "num_heads": 2, "vocab_size": 300}


class PlainBytes(Bytes):
    """A tokenizer whose files name no special tokens."""

    pad_id = bos_id = eos_id = None


def rows(model, tokenizer=None, **data):
    config = RunConfig(model=model, data=DataConfig(**data))
    tokenizer = tokenizer or Bytes()
    packed = build_set(config.data, make_objective(config, tokenizer), "train")
    return {name: column[0] for name, column in packed.rows([0]).items()}


@pytest.mark.parametrize(
    ("special", "wanted"),
    [
        (SpecialIds(), (1, 1, (2,))),
        (SpecialIds(bos=7), (7, 7, (2,))),
        (SpecialIds(eos=(5, 6), decoder_start=9), (1, 9, (5, 6))),
    ],
)
def test_model_overrides_tokenizer(special, wanted):
    model = gpt2(**SHAPE).model_copy(update={"special": special})
    assert special_ids(model, Bytes()) == wanted


def test_special_ids_without_a_tokenizer():
    assert special_ids(gpt2(**SHAPE), None) == (None, None, ())


@pytest.mark.parametrize(
    ("special", "wanted"),
    [
        (SpecialIds(), (None, None, ())),
        (SpecialIds(bos=7, eos=(5, 6)), (7, 7, (5, 6))),
        (SpecialIds(eos=(5, 6)), (5, 5, (5, 6))),
    ],
)
def test_tokenizer_without_special_tokens(special, wanted):
    assert special_ids(gpt2(**SHAPE).model_copy(update={"special": special}), PlainBytes()) == wanted


def test_training_ends_texts_with_the_eos_of_the_model():
    model = gpt2(**SHAPE).model_copy(update={"special": SpecialIds(bos=290, eos=(291,))})
    batch = rows(model, PlainBytes(), train=MemorySource(documents=("ab",)), length=4)
    np.testing.assert_array_equal(batch["targets"][:3], [100, 101, 291])


def test_training_without_any_eos_says_what_to_set():
    with pytest.raises(UserError, match=r"neither the model nor its tokenizer has an eos token.*model\.special\.eos"):
        rows(gpt2(**SHAPE), PlainBytes(), train=MemorySource(documents=("ab",)), length=4)


def test_training_wraps_documents_in_bos_and_eos_of_the_model():
    model = gpt2(**SHAPE).model_copy(update={"special": SpecialIds(bos=290, eos=(291, 292))})
    batch = rows(model, train=MemorySource(documents=("ab",)), length=4)
    np.testing.assert_array_equal(batch["tokens"][:3], [290, 100, 101])
    np.testing.assert_array_equal(batch["targets"][:3], [100, 101, 291])


def test_training_uses_the_decoder_start_token():
    model = vaswani(**SHAPE, mlp_dim=8).model_copy(update={"special": SpecialIds(eos=(291,), decoder_start=295)})
    data = {"train": MemorySource(pairs=(("ab", "c"),)), "length": 4, "objective": Seq2Seq(input_length=4)}
    batch = rows(model, **data)
    np.testing.assert_array_equal(batch["tokens"][:2], [295, 102])
    np.testing.assert_array_equal(batch["targets"][:2], [102, 291])
    np.testing.assert_array_equal(batch["inputs"][:3], [100, 101, Bytes.eos_id])  # as encode_source gives it
