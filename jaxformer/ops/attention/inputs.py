"""The inputs of every attention kernel as one value, so that a new option changes no signature."""

from dataclasses import dataclass, field

import jax
from jaxtyping import Array, Float, Int

from jaxformer.ops.biases import Bias
from jaxformer.ops.masks import Mask

SAVED_NAME = "attention"
"""The name that every kernel gives to what rematerialisation policies may save of it: its output and log-sum-exps."""


@dataclass(frozen=True)
class AttentionParams:
    """Constants of an attention layer, static under jit."""

    scale: float
    softcap: float | None = None
    dropout_rate: float = 0.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CachedKeysValues:
    """Keys and values in the arrays of a KV cache, for kernels that read them there."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S H"]
    layer: Int[Array, ""] | None
    """Index of the layer if the arrays are stacked."""
    lengths_B: Int[Array, " B"]
    """The query of a row sees this many entries, from the first one on."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionInputs:
    """N query heads share K key-value heads (arXiv:2305.13245).

    Keys and values have heads before positions, like the KV cache, so that matrix products read them contiguously.
    """

    q_BTNH: Float[Array, "B T N H"]
    k_BKSH: Float[Array, "B K S H"]
    v_BKSH: Float[Array, "B K S H"]
    mask: Mask
    params: AttentionParams = field(metadata={"static": True})
    bias: Bias | None = None
    dropout_key: jax.Array | None = None
    """None turns dropout off."""
    cache: CachedKeysValues | None = None
    """The same keys and values, and which of them are visible, if there is one query per row. Kernels may ignore it."""

    @property
    def num_queries(self) -> int:
        return self.q_BTNH.shape[1]

    @property
    def num_keys(self) -> int:
        return self.k_BKSH.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.k_BKSH.shape[1]

    @property
    def description(self) -> str:
        """For example `causal, window 4096, 8192 queries, 8192 keys`."""
        mask = self.mask
        parts = ["causal" if mask.causal else "both ways"]
        if mask.window is not None:
            parts.append(f"window {mask.window}")
        if self.bias is not None:
            parts.append(type(self.bias).__name__)
        if self.params.softcap is not None:
            parts.append(f"soft cap {self.params.softcap:g}")
        return ", ".join([*parts, f"{self.num_queries} queries", f"{self.num_keys} keys"])


def unsupported_shape(inputs: AttentionInputs) -> str | None:
    """Why no kernel supports these shapes; None if they are valid."""
    q, k, v = inputs.q_BTNH.shape, inputs.k_BKSH.shape, inputs.v_BKSH.shape
    if k != v:
        return f"keys have shape {k} and values {v}"
    if q[0] != k[0] or q[3] != k[3]:
        return f"queries of shape {q} and keys of shape {k} differ in batch size or head dimension"
    if q[2] % k[1]:
        return f"{q[2]} query heads are not a multiple of {k[1]} key-value heads"
    return None


def unsupported_features(inputs: AttentionInputs) -> str | None:
    """Why a fused kernel, which knows only causal masks, windows and segments, does not support the inputs."""
    mask = inputs.mask
    if inputs.bias is not None:
        return f"it adds no bias such as {type(inputs.bias).__name__} to the logits"
    if inputs.dropout_key is not None and inputs.params.dropout_rate > 0.0:
        return f"it has no dropout of attention probabilities, and the rate is {inputs.params.dropout_rate}"
    if mask.prefix is not None:
        return "it has no mask for prefixes"
    if mask.q_offset is not None or mask.kv_lengths is not None or mask.kv_index is not None:
        return "it does not read a KV cache"
    return None
