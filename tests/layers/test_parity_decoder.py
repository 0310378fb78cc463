"""Decoder-only models against transformers on random weights: logits, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import Rope
from jaxformer.layers import Transformer, abstract_params
from jaxformer.models.gpt2 import gpt2
from jaxformer.models.llama import llama
from jaxformer.ops.losses import cross_entropy
from jaxformer.typing import Tokens, tokens_from_ids

RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 61, size=(3, 9))
# The first row is whole, the second padded on the left, the third on the right.
MASK = np.array([[1] * 9, [0] * 3 + [1] * 6, [1] * 5 + [0] * 4])


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "llama_tied"])
def test_logits_are_those_of_transformers(families, family, padded):
    config, params, model = families[family]
    mask = MASK if padded else np.ones_like(MASK)
    tokens = tokens_from_ids(jnp.array(IDS), jnp.array(mask))
    ours = jax.jit(Transformer(config).apply)({"params": params}, tokens)
    theirs = _logits(model, mask, tokens).detach().numpy()
    real = mask.astype(bool)
    assert np.abs(theirs[real]).max() > 0.5, "logits near zero would agree too easily"
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradients_are_those_of_transformers(families, family):
    import torch
    from torch.nn import functional

    config, params, model = families[family]
    targets, weights = np.roll(IDS, -1, axis=1), MASK.astype(np.float32)
    tokens = tokens_from_ids(jnp.array(IDS), jnp.array(MASK))

    @jax.jit
    @jax.grad
    def gradient(params):
        return (
            cross_entropy(Transformer(config).apply({"params": params}, tokens), targets, weights)[0].loss
            / weights.sum()
        )

    logits = _logits(model, MASK, tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), reduction="none")
    model.zero_grad()
    ((loss * torch.tensor(weights).flatten()).sum() / weights.sum()).backward()
    wanted = CONVERT[family](config, {name: p.grad.numpy() for name, p in model.named_parameters()})
    jax.tree_util.tree_map_with_path(_close, gradient(params), wanted)


def test_packed_rows_are_separate_rows_to_transformers(families):
    """Two documents in one of our rows, alone in theirs."""
    import torch

    config, params, model = families["llama"]
    segments = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    ours = jax.jit(Transformer(config).apply)({"params": params}, Tokens(IDS[:1], positions, segments))
    with torch.no_grad():
        parts = [model(torch.tensor(IDS[:1, part])).logits.numpy() for part in (slice(4), slice(4, 9))]
    np.testing.assert_allclose(ours, np.concatenate(parts, axis=1), atol=1e-4)


# ---------------------------------------------------------------- weights
@pytest.fixture(scope="module")
def families():
    return {"gpt2": _gpt2(), "llama": _llama(tied=False), "llama_tied": _llama(tied=True)}


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = gpt2(num_layers=3, embed_dim=16, num_heads=4, vocab_size=61, max_length=12)
    theirs = GPT2Config(
        n_layer=3, n_embd=16, n_head=4, vocab_size=61, n_positions=12, attn_implementation="eager",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = _randomised(GPT2LMHeadModel(theirs))
    return config, _converted(config, _gpt2_params, model), model


def _llama(tied: bool):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = llama(
        num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=24, vocab_size=61, tied=tied,
        rope=Rope(theta=5e3),
    )  # fmt: skip
    theirs = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
        vocab_size=61, rms_norm_eps=1e-5, tie_word_embeddings=tied, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 5e3},
    )  # fmt: skip
    model = _randomised(LlamaForCausalLM(theirs))
    return config, _converted(config, _llama_params, model), model


def _gpt2_params(config, weights):
    """Their Conv1D keeps [in, out], with query, key and value side by side."""
    D, N, H, L = 16, 4, 4, config.decoder.num_layers

    def layers(name):
        return np.stack([weights[f"transformer.h.{i}.{name}"] for i in range(L)])

    def linear(name):
        return {"kernel": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    def norm(name):
        return {"scale": layers(f"{name}.weight"), "bias": layers(f"{name}.bias")}

    kernels, biases = layers("attn.c_attn.weight"), layers("attn.c_attn.bias")
    attention = {
        name: {
            "kernel": kernels[:, :, i * D : (i + 1) * D].reshape(L, D, N, H),
            "bias": biases[:, i * D : (i + 1) * D].reshape(L, N, H),
        }
        for i, name in enumerate("qkv")
    }
    out = linear("attn.c_proj")
    attention["out"] = {"kernel": out["kernel"].reshape(L, N, H, D), "bias": out["bias"]}
    block = {
        "attention": attention,
        "attention_norm": norm("ln_1"),
        "mlp": {"up": linear("mlp.c_fc"), "down": linear("mlp.c_proj")},
        "mlp_norm": norm("ln_2"),
    }
    final = {"scale": weights["transformer.ln_f.weight"], "bias": weights["transformer.ln_f.bias"]}
    embedding = {"tokens": weights["transformer.wte.weight"], "positions": weights["transformer.wpe.weight"]}
    return {"embedding": embedding, "decoder": {"blocks_0": block, "final_norm": final}}


def _llama_params(config, weights):
    """Their Linear keeps [out, in]."""
    D, H, L = 16, 4, config.decoder.num_layers

    def layers(name):
        return np.stack([weights[f"model.layers.{i}.{name}.weight"] for i in range(L)])

    def kernel(name, *shape):
        return {"kernel": layers(name).swapaxes(1, 2).reshape(L, *shape)}

    block = {
        "attention": {
            "q": kernel("self_attn.q_proj", D, 4, H),
            "k": kernel("self_attn.k_proj", D, 2, H),
            "v": kernel("self_attn.v_proj", D, 2, H),
            "out": kernel("self_attn.o_proj", 4, H, D),
        },
        "attention_norm": {"scale": layers("input_layernorm")},
        "mlp": {
            "gate": kernel("mlp.gate_proj", D, 24),
            "up": kernel("mlp.up_proj", D, 24),
            "down": kernel("mlp.down_proj", 24, D),
        },
        "mlp_norm": {"scale": layers("post_attention_layernorm")},
    }
    params = {
        "embedding": {"tokens": weights["model.embed_tokens.weight"]},
        "decoder": {"blocks_0": block, "final_norm": {"scale": weights["model.norm.weight"]}},
    }
    if not config.head.tied:
        params["head"] = {"output": {"kernel": weights["lm_head.weight"].T}}
    return params


CONVERT = {"gpt2": _gpt2_params, "llama": _llama_params}


def _randomised(model):
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def _converted(config, convert, model):
    """The tree must be exactly ours: no parameter left over, none missing."""
    params = convert(config, {name: p.detach().numpy() for name, p in model.named_parameters()})
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(config)[0])
    assert jax.tree.map(lambda leaf: leaf.shape, params) == shapes
    return params


def _logits(model, mask, tokens: Tokens):
    import torch

    return model(
        input_ids=torch.tensor(IDS),
        attention_mask=torch.tensor(mask),
        position_ids=torch.tensor(np.asarray(tokens.positions)).long(),
    ).logits


def _close(path, ours, wanted):
    error, size = np.linalg.norm(ours - wanted), np.linalg.norm(wanted)
    # A bias of all keys shifts a softmax as a whole: its gradient is zero, and noise on both sides.
    assert error < 1e-4 * size + 1e-5, f"{jax.tree_util.keystr(path)}: off by {error:.2e} of {size:.2e}"
