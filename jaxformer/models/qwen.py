"""Qwen 2.5 (arXiv:2412.15115) and Qwen 3 (arXiv:2505.09388), dense and mixture-of-experts."""

from collections.abc import Sequence

from jaxformer.config import Activation, ModelConfig, MoeConfig, Rope
from jaxformer.models.builders import builder
from jaxformer.models.llama import llama
from jaxformer.models.presets import Preset, ZooRow

_ROPE = Rope(theta=1e6)


@builder(extends=llama)
def qwen2(*, bias: bool = True, rope: Rope = _ROPE, eps: float = 1e-6, **options) -> ModelConfig:
    """Build a `llama` with biases on the query, key and value projections."""
    return llama(bias=bias, rope=rope, eps=eps, **options)


@builder(extends=llama)
def qwen3(
    *, head_dim: int | None = 128, qk_norm: bool = True, rope: Rope = _ROPE, eps: float = 1e-6, **options
) -> ModelConfig:
    """Build a `llama` with normalised queries and keys, and `head_dim` independent of `embed_dim`."""
    return llama(head_dim=head_dim, qk_norm=qk_norm, rope=rope, eps=eps, **options)


@builder(extends=qwen3, without=("moe", "mlp_bias"))
def qwen3_moe(
    *,
    mlp_dim: int,
    num_experts: int = 128,
    top_k: int = 8,
    activation: Activation = "silu",
    renormalize: bool = True,
    load_balance: float = 0.001,
    **options,
) -> ModelConfig:
    """Build a `qwen3` with experts of width `mlp_dim` in place of every MLP.

    Args:
      load_balance: weight of the load-balancing loss; the default is the published `router_aux_loss_coef`.
    """
    moe = MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        dim=mlp_dim,
        activation=activation,
        gated=True,
        renormalize=renormalize,
        load_balance=load_balance,
    )
    return qwen3(moe=moe, **options)


def _preset(build, shape: Sequence[int], vocab_size: int, context_length: int, **options) -> ModelConfig:
    num_layers, embed_dim, num_heads, num_kv_heads, mlp_dim = shape
    return build(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        mlp_dim=mlp_dim,
        vocab_size=vocab_size,
        context_length=context_length,
        **options,
    )


# Vocabulary sizes: the larger models of 2.5 pad their embedding table to a larger size.
_SMALL, _LARGE = 151_936, 152_064


_QWEN2_5 = {
    # The hub for Qwen/Qwen2.5-{0.5B,1.5B,3B,7B,32B}-Instruct, n_params of GGUF files for 14B, Keras for 72B.
    "qwen2.5-0.5b": Preset(494_032_768, lambda: _preset(qwen2, (24, 896, 14, 2, 4864), _SMALL, 32_768, tied=True)),
    "qwen2.5-1.5b": Preset(1_543_714_304, lambda: _preset(qwen2, (28, 1536, 12, 2, 8960), _SMALL, 131_072, tied=True)),
    "qwen2.5-3b": Preset(3_085_938_688, lambda: _preset(qwen2, (36, 2048, 16, 2, 11_008), _SMALL, 32_768, tied=True)),
    "qwen2.5-7b": Preset(7_615_616_512, lambda: _preset(qwen2, (28, 3584, 28, 4, 18_944), _LARGE, 131_072)),
    "qwen2.5-14b": Preset(14_770_033_664, lambda: _preset(qwen2, (48, 5120, 40, 8, 13_824), _LARGE, 131_072, eps=1e-5)),
    "qwen2.5-32b": Preset(32_763_876_352, lambda: _preset(qwen2, (64, 5120, 40, 8, 27_648), _LARGE, 131_072, eps=1e-5)),
    "qwen2.5-72b": Preset(72_706_203_648, lambda: _preset(qwen2, (80, 8192, 64, 8, 29_568), _LARGE, 131_072, eps=1e-5)),
}
_QWEN3 = {
    # The hub, where the files of 0.6B and 1.7B contain the tied embedding table twice; Keras for 14B.
    "qwen3-0.6b": Preset(
        751_632_384 - 151_936 * 1024, lambda: _preset(qwen3, (28, 1024, 16, 8, 3072), _SMALL, 40_960, tied=True)
    ),
    "qwen3-1.7b": Preset(
        2_031_739_904 - 151_936 * 2048, lambda: _preset(qwen3, (28, 2048, 16, 8, 6144), _SMALL, 40_960, tied=True)
    ),
    "qwen3-4b": Preset(4_022_468_096, lambda: _preset(qwen3, (36, 2560, 32, 8, 9728), _SMALL, 40_960, tied=True)),
    "qwen3-8b": Preset(8_190_735_360, lambda: _preset(qwen3, (36, 4096, 32, 8, 12_288), _SMALL, 40_960)),
    "qwen3-14b": Preset(14_768_307_200, lambda: _preset(qwen3, (40, 5120, 40, 8, 17_408), _SMALL, 40_960)),
    "qwen3-32b": Preset(32_762_123_264, lambda: _preset(qwen3, (64, 5120, 64, 8, 25_600), _SMALL, 40_960)),
}
_QWEN3_MOE = {
    # general.parameter_count of GGUF files for 30B-A3B, the hub for 235B-A22B.
    "qwen3-30b-a3b": Preset(30_532_122_624, lambda: _preset(qwen3_moe, (48, 2048, 32, 4, 768), _SMALL, 40_960)),
    "qwen3-235b-a22b": Preset(235_093_634_560, lambda: _preset(qwen3_moe, (94, 4096, 64, 4, 1536), _SMALL, 40_960)),
}

ZOO_ROWS = (ZooRow("Qwen2.5", _QWEN2_5), ZooRow("Qwen3", _QWEN3), ZooRow("Qwen3 MoE", _QWEN3_MOE))
