"""The layouts of the tables: every one in use is invertible, and both rotary pairings can be converted."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jaxformer.config import ModelConfig, Rope
from jaxformer.convert import FORMATS
from jaxformer.convert.export import export_model
from jaxformer.convert.tables import Rearrangement
from jaxformer.decode.scoring import forward
from jaxformer.layers import abstract_params
from jaxformer.models.llama import llama
from jaxformer.models.modernbert import modernbert
from jaxformer.models.t5 import t5
from jaxformer.run import load

MODELS = {
    "t5": [t5(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=9, gated=gated) for gated in (0, 1)],
    "modernbert": [
        modernbert(num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=9, masked_lm=head, pooled=not head)
        for head in (True, False)
    ],
}


def _layouts() -> list[str]:
    """Of every table there is; those that depend on the model, for models of each kind."""
    rows = set()
    for format in FORMATS.values():
        if not callable(format.entries):
            rows |= {row.layout.text for row in format.entries}
    for model in MODELS["t5"]:
        rows |= {row.layout.text for row in FORMATS["t5"].table(model)}
    for model in MODELS["modernbert"]:
        rows |= {row.layout.text for row in FORMATS["modernbert"].table(model)}
        rows |= {row.layout.text for row in FORMATS["roberta"].table(model)}
    rotated = {Rearrangement(text).with_neighbour_pairs().text for text in rows if "H" in text and "P" not in text}
    return sorted(rows | rotated | {"(N h 2) D -> D N (2 h)", "1 (2 V) -> V 2"})


def test_the_layouts_are_those_one_expects():
    """A table that this test cannot see would be missed by the next."""
    assert {"(N H) D -> D N H", "D (P N H) -> P D N H", "(P F) D -> P D F", "1 V -> V"} <= set(_layouts())


@pytest.mark.parametrize("text", _layouts())
@settings(max_examples=20)
@given(data=st.data())
def test_there_and_back_is_the_same(text, data):
    layout = Rearrangement(text)
    letters = sorted({letter for group in layout.ours for letter in group})
    lengths = {x: int(x) if x.isdigit() else data.draw(st.integers(1, 5), label=x) for x in letters}
    shape = tuple(int(np.prod([lengths[x] for x in group])) for group in layout.ours)
    parts = lengths["P"] = data.draw(st.integers(2, 4)) if layout.ours[0] == ["P"] else 1
    sizes = layout.sizes(shape[1:] if parts > 1 else shape, parts)
    assert {name: sizes[name] for name in letters} == {name: lengths[name] for name in letters}
    theirs = np.arange(np.prod(layout.file_shape(sizes))).reshape(layout.file_shape(sizes))
    ours = layout.to_ours(theirs, sizes)
    assert ours.shape == ((parts, *shape[1:]) if parts > 1 else shape)
    np.testing.assert_array_equal(layout.to_theirs(ours, sizes), theirs)
    np.testing.assert_array_equal(layout.to_ours(layout.to_theirs(ours, sizes), sizes), ours)


def test_what_a_layout_means():
    """Against the same written out by hand."""
    stored = np.arange(2 * 3 * 4 * 5).reshape(6 * 4, 5)  # (P N H) D with P = 2, N = 3, H = 4
    layout = Rearrangement("(P N H) D -> P D N H")
    ours = layout.to_ours(stored, layout.sizes((5, 3, 4), 2))
    assert ours[1, 4, 2, 3] == stored[1 * 12 + 2 * 4 + 3, 4]
    pairs = Rearrangement("(N h 2) D -> D N (2 h)")
    ours = pairs.to_ours(stored, pairs.sizes((5, 6, 4), 1))
    assert [ours[0, 0, i] for i in range(4)] == [stored[i, 0] for i in (0, 2, 1, 3)]


@pytest.mark.parametrize(("text", "shape"), [("(N 2 h) D -> D N (h 2)", (4, 2, 3)), ("(N 2) -> N 2", (4, 3))])
def test_a_length_that_does_not_divide_is_refused(text, shape):
    with pytest.raises(ValueError, match="a dimension of 3 is not made of"):
        Rearrangement(text).sizes(shape, 1)


# ---------------------------------------------------------------- rotary pairing
def _model(**options) -> ModelConfig:
    shape = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "vocab_size": 32}
    return llama(**shape, **options, num_kv_heads=1, context_length=32)


def test_channels_paired_with_neighbours_are_reordered_for_the_files(tmp_path):
    """Files pair a channel with the one half a head away; the model computes the same."""
    model = _model(rope=Rope(pairing="neighbours"), bias=True, output_bias=True, qk_norm=True)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: 0.5 * rng.standard_normal(x.shape, np.float32), abstract_params(model)[0])
    export_model(tmp_path, model, params, np.dtype("float32"))
    again = load(tmp_path)
    assert again.config.model.decoder.pattern[0].attention.position.pairing == "halves"
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for part in ("q", "k"):
        ours = params["decoder"]["blocks_0"]["attention"][part]["kernel"]
        stored = again.params["decoder"]["blocks_0"]["attention"][part]["kernel"]
        np.testing.assert_array_equal(stored, ours[..., order])
    np.testing.assert_array_equal(
        again.params["decoder"]["blocks_0"]["attention"]["v"]["kernel"],
        params["decoder"]["blocks_0"]["attention"]["v"]["kernel"],
    )
    ids = np.arange(3, 23).reshape(2, 10)
    here = type(again)(again.config.model_copy(update={"model": model}), type(again.model)(model), params, None, 0)
    np.testing.assert_allclose(forward(here, ids), forward(again, ids), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_model(rope=Rope(pairing="neighbours", fraction=0.5)), "position.pairing would be 'halves', not 'neighbours'"),
        (
            modernbert(
                num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, vocab_size=32,
                rope=Rope(pairing="neighbours"), local_rope=Rope(pairing="neighbours"),
            ),
            "RoPE rotates neighbouring channels, and one tensor holds query, key and value",
        ),
    ],
    ids=["half of the channels", "a fused tensor"],
)  # fmt: skip
def test_pairings_that_no_file_can_hold_are_refused(model, message, tmp_path):
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(model)[0])
    with pytest.raises(ValueError, match=message):
        export_model(tmp_path, model, params, np.dtype("float32"))
    assert not list(tmp_path.iterdir())
