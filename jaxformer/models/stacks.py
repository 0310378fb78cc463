"""Builds a stack from the list of its layers, for families whose layers differ."""

from collections.abc import Sequence

from jaxformer.config import BlockConfig, BucketBias, NormConfig, StackConfig


def stack(
    blocks: Sequence[BlockConfig], final_norm: NormConfig | None = None, relative_bias: BucketBias | None = None
) -> StackConfig:
    """Build the stack with these layers, in order of depth.

    They are split into the shortest possible `first` and repeating `pattern`, because each entry of the two is compiled
    separately.
    """
    num_first = _num_first(blocks)
    period = _period(blocks[num_first:])
    return StackConfig(
        num_layers=len(blocks),
        first=tuple(blocks[:num_first]),
        pattern=tuple(blocks[num_first : num_first + period]),
        final_norm=final_norm,
        relative_bias=relative_bias,
    )


def _num_first(blocks: Sequence[BlockConfig]) -> int:
    """The number of leading layers outside the pattern that minimises leading layers plus pattern length."""
    return min(range(len(blocks)), key=lambda start: start + _period(blocks[start:]))


def _period(blocks: Sequence[BlockConfig]) -> int:
    """The length of the shortest pattern that repeats through the list."""
    periods = range(1, len(blocks) + 1)
    return next(p for p in periods if all(a == b for a, b in zip(blocks, blocks[p:], strict=False)))
