"""Mixtral (arXiv:2401.04088): Llama whose MLPs are mixtures of eight experts, two of them active per token."""

from jaxformer.config import Activation, ModelConfig, MoeConfig, Rope
from jaxformer.models.builders import builder
from jaxformer.models.llama import llama
from jaxformer.models.presets import Preset, ZooRow

_ROPE = Rope(theta=1e6)


@builder(extends=llama, without=("moe", "mlp_bias"))
def mixtral(
    *,
    mlp_dim: int,
    num_experts: int = 8,
    top_k: int = 2,
    activation: Activation = "silu",
    load_balance: float = 0.02,
    rope: Rope = _ROPE,
    **options,
) -> ModelConfig:
    """Build a `llama` with experts of width `mlp_dim`.

    Args:
      load_balance: weight of the load-balancing loss; the default is `router_aux_loss_coef` of the published 8x7B.
    """
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        dim=mlp_dim,
        activation=activation,
        gated=True,
        renormalize=True,  # section 2.1: softmax over the top two logits
        load_balance=load_balance,
    )
    return llama(moe=moe, rope=rope, **options)


_PRESETS = {
    # The hub for mistralai/Mixtral-8x7B-Instruct-v0.1, and for mistral-community/Mixtral-8x22B-v0.1.
    "mixtral-8x7b": Preset(
        46_702_792_704,
        lambda: mixtral(
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=14_336,
            vocab_size=32_000,
            context_length=32_768,
        ),
    ),
    "mixtral-8x22b": Preset(
        140_620_634_112,
        lambda: mixtral(
            num_layers=56,
            embed_dim=6144,
            num_heads=48,
            num_kv_heads=8,
            mlp_dim=16_384,
            vocab_size=32_000,
            context_length=65_536,
            load_balance=0.001,
        ),
    ),
}

ZOO_ROWS = (ZooRow("Mixtral", _PRESETS),)
