"""A plain Python definition of attention masks, the reference for tests of masks and attention."""

from collections.abc import Callable

import numpy as np
import pytest

from jaxformer.ops.masks import Mask


@pytest.fixture(scope="session")
def visible() -> Callable[[Mask, int, int, int], np.ndarray]:
    """`visible(mask, B, T, S)` returns [B, T, S] booleans, computed for one query and one key at a time."""

    def matrix(mask: Mask, B: int, T: int, S: int) -> np.ndarray:
        return np.array([[[_sees(mask, b, t, s) for s in range(S)] for t in range(T)] for b in range(B)])

    return matrix


def _sees(mask: Mask, b: int, t: int, s: int) -> bool:
    if mask.q_segments is not None and mask.q_segments[b][t] != mask.kv_segments[b][s]:
        return False
    in_prefix = mask.prefix is not None and bool(mask.prefix[b][s])
    s = s if mask.kv_index is None else int(mask.kv_index[b][s])
    if s < 0:
        return False
    index = t + (0 if mask.q_offset is None else int(mask.q_offset[b]))
    if mask.causal and s > index and not in_prefix:
        return False
    if mask.window is not None and abs(index - s) >= mask.window:
        return False
    return mask.kv_lengths is None or s < mask.kv_lengths[b]
