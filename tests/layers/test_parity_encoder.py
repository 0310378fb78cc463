"""The original encoder-decoder, an encoder and single blocks against torch with random weights.

tests/zoo compares the model families of transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    InitConfig,
    Learned,
    MlpConfig,
    ModelConfig,
    NormConfig,
    StackConfig,
    apply_overrides,
)
from jaxformer.layers import Runtime, Transformer, abstract_params
from jaxformer.layers.attention import Attention
from jaxformer.layers.block import Block, Context
from jaxformer.models.vaswani import vaswani
from jaxformer.ops.losses import cross_entropy
from jaxformer.ops.masks import Mask
from jaxformer.typing import tokens_from_ids

D, N, H, F, V, L = 16, 4, 4, 24, 61, 3
RNG = np.random.default_rng(0)
SOURCE, TARGET = RNG.integers(0, V, size=(2, 7)), RNG.integers(0, V, size=(2, 6))
SOURCE_MASK = np.array([[1] * 7, [1] * 4 + [0] * 3])
TARGET_MASK = np.array([[1] * 5 + [0] * 1, [1] * 6])


# ---------------------------------------------------------------- encoder-decoder
def test_encoder_decoder_logits_match_torch(translator):
    config, params, model, table = translator
    ours = _apply(config, params)
    theirs = _torch_translate(model, table).detach().numpy()
    real = TARGET_MASK.astype(bool)
    assert np.abs(theirs[real]).max() > 0.5, "logits near zero would agree too easily"
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=1e-4)


@pytest.mark.slow
def test_encoder_decoder_gradients_match_torch(translator):
    import torch

    config, params, model, table = translator
    targets, weights = np.roll(TARGET, -1, axis=1), TARGET_MASK.astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(params):
        return cross_entropy(_apply(config, params), targets, weights)[0].loss / weights.sum()

    model.zero_grad()
    table.grad = None
    logits = _torch_translate(model, table)
    loss = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), reduction="none")
        * torch.tensor(weights).flatten()
    )
    (loss.sum() / weights.sum()).backward()
    expected = _translator_params(model, table, lambda p: p.grad.numpy())
    jax.tree_util.tree_map_with_path(_close, gradient(params), expected)


@pytest.fixture(scope="module")
def translator():
    """The original model, with attention biases, which torch has and the paper does not."""
    import torch
    from torch import nn

    config = vaswani(num_layers=L, embed_dim=D, num_heads=N, mlp_dim=F, vocab_size=V, dropout=0.0)
    attentions = ("encoder.pattern.0.attention", "decoder.pattern.0.attention", "decoder.pattern.0.cross_attention")
    config = apply_overrides(config, [f"{a}.{field}=true" for a in attentions for field in ("bias", "output_bias")])
    options = {"dropout": 0.0, "layer_norm_eps": 1e-6, "batch_first": True}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, N, F, **options), L, norm=None, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, N, F, **options), L, norm=None)
    model = _randomised(nn.Transformer(D, N, custom_encoder=encoder, custom_decoder=decoder, batch_first=True))
    table = torch.tensor(RNG.normal(size=(V, D)).astype(np.float32), requires_grad=True)
    params = _translator_params(model, table, lambda p: p.detach().numpy())
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config)[0])
    assert jax.tree.map(lambda leaf: leaf.shape, params) == shapes
    return config, params, model, table


def _apply(config, params):
    target = tokens_from_ids(jnp.array(TARGET), jnp.array(TARGET_MASK))
    source = tokens_from_ids(jnp.array(SOURCE), jnp.array(SOURCE_MASK))
    return jax.jit(Transformer(config).apply)({"params": params}, target, source)


def _torch_translate(model, table):
    import torch

    def embedded(ids):
        position, channel = np.arange(ids.shape[1])[:, None], np.arange(0, D, 2)
        angles = position / 10_000 ** (channel / D)
        sines = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(ids.shape[1], D)
        return table[torch.tensor(ids)] * D**0.5 + torch.tensor(sines.astype(np.float32))

    padding = torch.tensor(SOURCE_MASK == 0)
    future = torch.triu(torch.ones(TARGET.shape[1], TARGET.shape[1], dtype=torch.bool), 1)
    # The target needs no padding mask: its padding is on the right, where causal queries do not see it.
    hidden = model(
        embedded(SOURCE),
        embedded(TARGET),
        tgt_mask=future,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    return hidden @ table.T


def _translator_params(model, table, read):
    encoder = {
        "attention": _attention([layer.self_attn for layer in model.encoder.layers], read),
        "attention_norm": _norm([layer.norm1 for layer in model.encoder.layers], read),
        "mlp": _mlp(model.encoder.layers, read),
        "mlp_norm": _norm([layer.norm2 for layer in model.encoder.layers], read),
    }
    decoder = _decoder_block(model.decoder.layers, read)
    return {
        "embedding": {"tokens": read(table)},
        "encoder": {"blocks_0": encoder},
        "decoder": {"blocks_0": decoder},
    }


# ---------------------------------------------------------------- encoder-only
def test_encoder_hidden_states_match_torch():
    import torch
    from torch import nn

    norm = NormConfig(eps=1e-5)
    block = BlockConfig(
        attention=AttentionConfig(num_heads=N, head_dim=H, bias=True, output_bias=True),
        mlp=MlpConfig(dim=F, activation="gelu", bias=True),
        norm=norm,
    )
    config = ModelConfig(
        vocab_size=V,
        embed_dim=D,
        embedding=EmbeddingConfig(position=Learned(max_length=9), norm=norm),
        encoder=StackConfig(num_layers=L, pattern=(block,), final_norm=norm),
        head=None,
    )
    layer = nn.TransformerEncoderLayer(D, N, F, 0.0, "gelu", batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "tokens": nn.Embedding(V, D),
            "positions": nn.Embedding(9, D),
            "norm": nn.LayerNorm(D),
            "encoder": nn.TransformerEncoder(layer, L, norm=nn.LayerNorm(D), enable_nested_tensor=False),
        }
    )
    _randomised(model)
    layers = model["encoder"].layers
    params = {
        "embedding": {
            "tokens": _read(model["tokens"].weight),
            "positions": _read(model["positions"].weight),
            "norm": _layer_norm(model["norm"]),
        },
        "encoder": {
            "blocks_0": {
                "attention": _attention([layer.self_attn for layer in layers]),
                "attention_norm": _norm([layer.norm1 for layer in layers]),
                "mlp": _mlp(layers),
                "mlp_norm": _norm([layer.norm2 for layer in layers]),
            },
            "final_norm": _layer_norm(model["encoder"].norm),
        },
    }
    tokens = tokens_from_ids(jnp.array(SOURCE), jnp.array(SOURCE_MASK))
    ours = jax.jit(Transformer(config).apply)({"params": params}, tokens)
    with torch.no_grad():
        x = model["norm"](model["tokens"](torch.tensor(SOURCE)) + model["positions"](torch.arange(7)))
        theirs = model["encoder"](x, src_key_padding_mask=torch.tensor(SOURCE_MASK == 0)).numpy()
    real = SOURCE_MASK.astype(bool)
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=1e-4)


# ---------------------------------------------------------------- single layers
def test_attention_matches_torch_multihead_attention():
    import torch
    from torch import nn

    module = _randomised(nn.MultiheadAttention(D, N, batch_first=True))
    x, y = _normal(2, 6, D), _normal(2, 7, D)
    with torch.no_grad():
        padding = torch.tensor(SOURCE_MASK == 0)
        theirs = module(torch.tensor(x), torch.tensor(y), torch.tensor(y), key_padding_mask=padding)[0]
    config = AttentionConfig(num_heads=N, head_dim=H, bias=True, output_bias=True)
    ours = Attention(config, D, InitConfig().kernel, 1.0, Runtime())
    params = jax.tree.map(lambda a: a[0], _attention([module]))
    mask = Mask(kv_lengths=jnp.array(SOURCE_MASK.sum(1)))
    actual = ours.apply({"params": params}, x, y, mask, method=_attend_to)
    np.testing.assert_allclose(actual, theirs.numpy(), atol=1e-5)


def _attend_to(module, x, y, mask):
    return module(x, module.keys_values(y), mask)


def test_a_post_norm_decoder_block_matches_torch():
    import torch
    from torch import nn

    layer = _randomised(nn.TransformerDecoderLayer(D, N, F, 0.0, "relu", batch_first=True))
    x, source = _normal(2, 6, D), _normal(2, 7, D)
    with torch.no_grad():
        future = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
        theirs = layer(torch.tensor(x), torch.tensor(source), tgt_mask=future)
    plain = AttentionConfig(num_heads=N, head_dim=H, bias=True, output_bias=True)
    config = BlockConfig(
        attention=plain.model_copy(update={"causal": True}),
        cross_attention=plain,
        mlp=MlpConfig(dim=F, activation="relu", bias=True),
        placement="post",
    )
    params = jax.tree.map(lambda a: a[0], _decoder_block([layer]))
    np.testing.assert_allclose(_block(config, params, x, source), theirs.numpy(), atol=1e-5)


def test_a_sandwich_block_matches_torch():
    """Norms on both sides of every sub-layer; multi-query attention with a custom scale, cross-attention, gated MLP."""
    import torch
    from torch.nn import functional

    config = BlockConfig(
        attention=AttentionConfig(num_heads=N, num_kv_heads=1, head_dim=6, causal=True, scale=0.7),
        cross_attention=AttentionConfig(num_heads=2, head_dim=10),
        mlp=MlpConfig(dim=F, activation="gelu", gated=True),
        norm=NormConfig(kind="rms", eps=1e-3),
        placement="sandwich",
    )
    names = ["attention", "cross_attention", "mlp"]
    params = {f"{name}{end}": {"scale": _normal(D)} for name in names for end in ("_norm", "_post_norm")}
    params["attention"] = _projections(N, 1, 6)
    params["cross_attention"] = _projections(2, 2, 10)
    params["mlp"] = {
        "up": {"kernel": _normal(D, F)}, "gate": {"kernel": _normal(D, F)}, "down": {"kernel": _normal(F, D)},
    }  # fmt: skip
    x, source = _normal(2, 6, D), _normal(2, 7, D)
    p = jax.tree.map(torch.tensor, params)

    def norm(name, h):
        return functional.rms_norm(h, (D,), p[name]["scale"], 1e-3)

    def attention(weights, h, memory, **options):
        q = torch.einsum("btd,dnh->bnth", h, weights["q"]["kernel"])
        k = torch.einsum("bsd,dnh->bnsh", memory, weights["k"]["kernel"])
        v = torch.einsum("bsd,dnh->bnsh", memory, weights["v"]["kernel"])
        mixed = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        return torch.einsum("bnth,nhd->btd", mixed, weights["out"]["kernel"])

    h = torch.tensor(x)
    inner = norm("attention_norm", h)
    inner = attention(p["attention"], inner, inner, is_causal=True, scale=0.7)
    h = h + norm("attention_post_norm", inner)
    inner = attention(p["cross_attention"], norm("cross_attention_norm", h), torch.tensor(source))
    h = h + norm("cross_attention_post_norm", inner)
    inner = norm("mlp_norm", h)
    inner = functional.gelu(inner @ p["mlp"]["gate"]["kernel"]) * (inner @ p["mlp"]["up"]["kernel"])
    h = h + norm("mlp_post_norm", inner @ p["mlp"]["down"]["kernel"])

    np.testing.assert_allclose(_block(config, params, x, source), h.numpy(), atol=1e-5)


# ---------------------------------------------------------------- weights
def _block(config, params, x, source):
    positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
    context = Context(positions, jnp.ones_like(positions), source, jnp.ones(source.shape[:2], int))
    block = Block(config, D, InitConfig(), 1.0, Runtime())
    return jax.jit(block.apply)({"params": params}, x, context)[0]


def _read(parameter):
    return parameter.detach().numpy()


def _decoder_block(layers, read=_read):
    return {
        "attention": _attention([layer.self_attn for layer in layers], read),
        "attention_norm": _norm([layer.norm1 for layer in layers], read),
        "cross_attention": _attention([layer.multihead_attn for layer in layers], read),
        "cross_attention_norm": _norm([layer.norm2 for layer in layers], read),
        "mlp": _mlp(layers, read),
        "mlp_norm": _norm([layer.norm3 for layer in layers], read),
    }


def _attention(modules, read=_read):
    """Parameters of our attention; torch stores kernels as [out, in], with query, key and value concatenated."""
    kernels = np.stack([read(m.in_proj_weight) for m in modules]).reshape(-1, 3, D, D).swapaxes(2, 3)
    biases = np.stack([read(m.in_proj_bias) for m in modules]).reshape(-1, 3, N, H)
    params = {
        name: {"kernel": kernels[:, i].reshape(-1, D, N, H), "bias": biases[:, i]} for i, name in enumerate("qkv")
    }
    out = _linear([m.out_proj for m in modules], read)
    return params | {"out": {"kernel": out["kernel"].reshape(-1, N, H, D), "bias": out["bias"]}}


def _mlp(layers, read=_read):
    return {
        "up": _linear([layer.linear1 for layer in layers], read),
        "down": _linear([layer.linear2 for layer in layers], read),
    }


def _linear(modules, read=_read):
    kernels = np.stack([read(m.weight).T for m in modules])
    return {"kernel": kernels, "bias": np.stack([read(m.bias) for m in modules])}


def _norm(modules, read=_read):
    return {"scale": np.stack([read(m.weight) for m in modules]), "bias": np.stack([read(m.bias) for m in modules])}


def _layer_norm(module):
    return {"scale": _read(module.weight), "bias": _read(module.bias)}


def _projections(heads, kv_heads, head_dim):
    return {
        "q": {"kernel": _normal(D, heads, head_dim)},
        "k": {"kernel": _normal(D, kv_heads, head_dim)},
        "v": {"kernel": _normal(D, kv_heads, head_dim)},
        "out": {"kernel": _normal(heads, head_dim, D)},
    }


def _randomised(model):
    """Add noise to every parameter, including norms and biases; training mode avoids torch's fast path."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def _normal(*shape):
    return (0.5 * RNG.normal(size=shape)).astype(np.float32)


def _close(path, ours, expected):
    error, size = np.linalg.norm(ours - expected), np.linalg.norm(expected)
    # The bias of keys shifts all logits of a softmax equally, so its gradient is zero up to rounding noise.
    assert error < 1e-4 * size + 1e-5, f"{jax.tree_util.keystr(path)}: off by {error:.2e} of {size:.2e}"
