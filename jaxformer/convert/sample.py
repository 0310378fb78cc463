"""Tiny random models of transformers, on which parity with this library is measured.

Every tensor is random, norms and biases included: transformers initialises those to 1 and 0, where a missing scale or
a bias added twice would not be noticed. A sample is data; making one needs torch and transformers, which only the
`test` extra installs.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 96
POSITIONS = 160  # several blocks of the blocked attention kernel


@dataclass(frozen=True)
class Sample:
    """How to make a tiny model of one Hugging Face architecture."""

    preset: str
    """A preset of the same family and architecture, whose row of the zoo table reports the parity of this sample."""
    model_type: str
    architecture: str
    """Name of the model class in transformers."""
    config: str
    """Name of the config class in transformers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Arguments of the config class. Windows must be shorter than the sequences on which parity is measured."""
    untied_output: bool = False
    """Whether to replace the output projection, where transformers ties that of a new model despite its config."""

    def make(self, seed: int = 0) -> Any:
        """The model in evaluation mode."""
        import torch
        import transformers

        transformers.logging.disable_progress_bar()
        config = getattr(transformers, self.config)(**self.fields)
        torch.manual_seed(seed)
        model = getattr(transformers, self.architecture)(config).eval()
        if self.untied_output:
            shape = model.lm_head.weight.shape
            model.lm_head.weight = torch.nn.Parameter(shape[1] ** -0.5 * torch.randn(shape))
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if tensor.requires_grad or name == "final_logits_bias":  # the rest are constants
                    tensor.add_(_noise_scale(name, tensor) * torch.randn(tensor.shape))
        return model

    def save(self, directory: str | Path, seed: int = 0) -> Any:
        """Make the model and write it with `save_pretrained`."""
        model = self.make(seed)
        model.save_pretrained(directory)
        return model


def _noise_scale(name: str, tensor: Any) -> float:
    """Large enough that attention is not uniform and experts differ, small enough that nothing saturates."""
    if tensor.ndim < 2 or "relative_attention_bias" in name:
        return 0.2
    return 0.5 * tensor.shape[-1] ** -0.5 if "embed" not in name and "wte" not in name else 0.5


# Config fields that many architectures share.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED_QUERY = SHAPE | {"num_key_value_heads": 2}
WIDE_HEADS = GROUPED_QUERY | {"head_dim": 16}  # wider than hidden_size / num_attention_heads
