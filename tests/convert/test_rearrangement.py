"""The layouts of the conversion tables: all are invertible, and both RoPE pairings can be converted."""

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
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.llama import llama
from jaxformer.models.modernbert import modernbert
from jaxformer.models.t5 import t5
from jaxformer.run import load

MODELS = {
    "gpt2": [gpt2(num_layers=1, embed_dim=8, num_heads=2, vocab_size=9)],
    "t5": [t5(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=9, gated=gated) for gated in (0, 1)],
    "modernbert": [
        modernbert(num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=9, masked_lm=head, pooled=not head)
        for head in (True, False)
    ],
}


def _layouts() -> list[str]:
    """Collect the layouts of all tables; tables that depend on the model are built for each variant."""
    rows = set()
    for format in FORMATS.values():
        if not callable(format.entries):
            rows |= {row.layout.text for row in format.entries}
    for name in ("gpt2", "t5"):
        rows |= {row.layout.text for model in MODELS[name] for row in FORMATS[name].table(model)}
    for model in MODELS["modernbert"]:
        rows |= {row.layout.text for row in FORMATS["modernbert"].table(model)}
        rows |= {row.layout.text for row in FORMATS["roberta"].table(model)}
    rotated = {Rearrangement(text).with_neighbour_pairs().text for text in rows if "H" in text and "P" not in text}
    return sorted(rows | rotated | {"(N h 2) D -> D N (2 h)", "1 (2 V) -> V 2"})


def test_layouts_of_all_tables_are_collected():
    """Guards the parametrisation of the next test."""
    assert {"(N H) D -> D N H", "D (P N H) -> P D N H", "(P F) D -> P D F", "1 V -> V"} <= set(_layouts())


@pytest.mark.parametrize("text", _layouts())
@settings(max_examples=20)
@given(data=st.data())
def test_layout_round_trip(text, data):
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


def test_layout_against_manual_indexing():
    stored = np.arange(2 * 3 * 4 * 5).reshape(6 * 4, 5)  # (P N H) D with P = 2, N = 3, H = 4
    layout = Rearrangement("(P N H) D -> P D N H")
    ours = layout.to_ours(stored, layout.sizes((5, 3, 4), 2))
    assert ours[1, 4, 2, 3] == stored[1 * 12 + 2 * 4 + 3, 4]
    pairs = Rearrangement("(N h 2) D -> D N (2 h)")
    ours = pairs.to_ours(stored, pairs.sizes((5, 6, 4), 1))
    assert [ours[0, 0, i] for i in range(4)] == [stored[i, 0] for i in (0, 2, 1, 3)]


@pytest.mark.parametrize(("text", "shape"), [("(N 2 h) D -> D N (h 2)", (4, 2, 3)), ("(N 2) -> N 2", (4, 3))])
def test_dimension_that_cannot_be_split_raises(text, shape):
    with pytest.raises(ValueError, match="a dimension of 3 cannot be split into axes"):
        Rearrangement(text).sizes(shape, 1)


# ---------------------------------------------------------------- RoPE pairing
def _model(**options) -> ModelConfig:
    shape = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16, "vocab_size": 32}
    return llama(**shape, **options, num_kv_heads=1, context_length=32)


def test_neighbour_pairs_are_reordered_on_export(tmp_path):
    """Files pair channel i with i + head_dim / 2; the exported model has the same outputs."""
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
    original = type(again)(again.config.model_copy(update={"model": model}), type(again.model)(model), params, None, 0)
    np.testing.assert_allclose(forward(original, ids), forward(again, ids), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_model(rope=Rope(pairing="neighbours", fraction=0.5)), "position.pairing would be 'halves', not 'neighbours'"),
        (
            modernbert(
                num_layers=2, embed_dim=16, num_heads=2, mlp_dim=16, vocab_size=32,
                rope=Rope(pairing="neighbours"), local_rope=Rope(pairing="neighbours"),
            ),
            "RoPE with pairing='neighbours' is not supported for fused query-key-value tensors",
        ),
    ],
    ids=["half of the channels", "a fused tensor"],
)  # fmt: skip
def test_unsupported_pairings_raise(model, message, tmp_path):
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), abstract_params(model)[0])
    with pytest.raises(ValueError, match=message):
        export_model(tmp_path, model, params, np.dtype("float32"))
    assert not list(tmp_path.iterdir())
