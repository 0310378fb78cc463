"""Word vectors (arXiv:1301.3781, arXiv:1310.4546): two vectors per word, one as an input and one as an output."""

from jaxformer.config import HeadConfig, InitConfig, ModelConfig, NormalInit, SpecialIds
from jaxformer.models.builders import builder

_SPECIAL = SpecialIds()


@builder()
def word2vec(*, vocab_size: int, embed_dim: int, special: SpecialIds = _SPECIAL) -> ModelConfig:
    """A model without layers, for the objective `word2vec`."""
    # The variance of the original implementation, which draws input vectors evenly from +-0.5 / embed_dim. Deviation:
    # output vectors start like them instead of at 0.
    init = NormalInit(stddev=1 / (embed_dim * 12**0.5))
    return ModelConfig(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        head=HeadConfig(tied=False),
        special=special,
        init=InitConfig(kernel=init, embedding=init),
    )
