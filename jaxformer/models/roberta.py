"""RoBERTa (arXiv:1907.11692): BERT trained longer and without next-sentence prediction."""

from jaxformer.config import Activation, Learned, ModelConfig, SpecialIds
from jaxformer.models.bert import bert
from jaxformer.models.builders import builder
from jaxformer.models.presets import Preset, ZooRow

# The first two rows of the published table are unused: positions count from the padding id plus one.
_POSITION = Learned(max_length=512, offset=2)
_SPECIAL = SpecialIds(bos=0, eos=(2,), pad=1)


@builder(extends=bert)
def roberta(
    *,
    vocab_size: int = 50_265,
    position: Learned = _POSITION,
    num_types: int = 1,
    eps: float = 1e-5,
    head_activation: Activation = "gelu",
    special: SpecialIds = _SPECIAL,
    **options,
) -> ModelConfig:
    """Build a `bert` with the defaults of RoBERTa."""
    return bert(
        vocab_size=vocab_size,
        position=position,
        num_types=num_types,
        eps=eps,
        head_activation=head_activation,
        special=special,
        **options,
    )


_PRESETS = {
    # F32 counts of roberta-{base,large} on Hugging Face's documentation page about parsing safetensors metadata.
    "roberta-base": Preset(124_697_433, lambda: roberta(num_layers=12, embed_dim=768, num_heads=12, mlp_dim=3072)),
    "roberta-large": Preset(355_412_057, lambda: roberta(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=4096)),
}

ZOO_ROWS = (ZooRow("RoBERTa", _PRESETS),)
