"""RoBERTa (arXiv:1907.11692): BERT trained longer, on masked tokens alone."""

from jaxformer.config import Learned, ModelConfig, SpecialIds
from jaxformer.models.bert import bert

# The first two rows of the published table belong to no position.
_POSITION = Learned(max_length=512, offset=2)
_SPECIAL = SpecialIds(bos=0, eos=(2,), pad=1)


def roberta(
    *,
    vocab_size: int = 50_265,
    position: Learned = _POSITION,
    num_types: int = 1,
    eps: float = 1e-5,
    special: SpecialIds = _SPECIAL,
    **options,
) -> ModelConfig:
    """A `bert` of these options."""
    return bert(
        vocab_size=vocab_size,
        position=position,
        num_types=num_types,
        eps=eps,
        head_activation="gelu",
        special=special,
        **options,
    )


PRESETS = {
    "roberta-base": lambda: roberta(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072),
    "roberta-large": lambda: roberta(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096),
}
