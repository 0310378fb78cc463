"""A stack from a plain list of its layers, for families whose layers are not all alike."""

from collections.abc import Sequence

from jaxformer.config import BlockConfig, BucketBias, NormConfig, StackConfig


def stack(
    blocks: Sequence[BlockConfig], final_norm: NormConfig | None = None, relative_bias: BucketBias | None = None
) -> StackConfig:
    """The stack with these layers in order of depth, in as few places as will do: each is compiled on its own."""
    num_first = _shortest_start(blocks)
    period = _period(blocks[num_first:])
    return StackConfig(
        num_layers=len(blocks),
        first=tuple(blocks[:num_first]),
        pattern=tuple(blocks[num_first : num_first + period]),
        final_norm=final_norm,
        relative_bias=relative_bias,
    )


def _shortest_start(blocks: Sequence[BlockConfig]) -> int:
    """How many layers to set apart so that these and the pattern of the rest are fewest."""
    return min(range(len(blocks)), key=lambda start: start + _period(blocks[start:]))


def _period(blocks: Sequence[BlockConfig]) -> int:
    """After how many layers the list repeats itself."""
    periods = range(1, len(blocks) + 1)
    return next(p for p in periods if all(a == b for a, b in zip(blocks, blocks[p:], strict=False)))
