"""`jf.embed` against pooled hidden states of transformers."""

import numpy as np
import pytest

import jaxformer as jf
from jaxformer.convert import SAMPLES
from jaxformer.errors import UserError

ROWS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18, 19]]


@pytest.fixture(scope="module", params=["minilm", "llama"])
def both(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    return SAMPLES[request.param].save(directory), jf.load(directory)


def hidden(model, row) -> np.ndarray:
    import torch

    with torch.no_grad():
        outputs = model(torch.tensor([row]), output_hidden_states=True)
    return outputs.hidden_states[-1][0].numpy()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("pooling", "pool"), [("mean", lambda h: h.mean(0)), ("cls", lambda h: h[0]), ("last", lambda h: h[-1])]
)
def test_vectors_are_pooled_hidden_states(both, pooling, pool, normalize):
    model, run = both
    expected = np.stack([pool(hidden(model, row)) for row in ROWS])
    if normalize:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(jf.embed(run, ROWS, pooling, normalize), expected, atol=1e-5)


def test_vectors_do_not_depend_on_the_batch(both):
    _, run = both
    alone = np.concatenate([jf.embed(run, [row]) for row in ROWS])
    np.testing.assert_allclose(jf.embed(run, ROWS), alone, atol=1e-6)


def test_no_texts_give_no_vectors(both):
    assert jf.embed(both[1], []).shape == (0, 32)


def test_unknown_pooling_and_encoder_decoders_are_rejected(both, tmp_path):
    with pytest.raises(UserError, match="pooling='max': must be one of mean, cls, last"):
        jf.embed(both[1], ROWS, pooling="max")
    SAMPLES["t5"].save(tmp_path)
    with pytest.raises(UserError, match="embed: an encoder-decoder"):
        jf.embed(jf.load(tmp_path), ROWS)
