"""Tiny random transformers models, used to measure the parity of jaxformer with transformers.

All tensors are random, including norms and biases: transformers initialises these to 1 and 0, which would hide a
missing scale or a bias that is added twice. `Sample.make` needs torch and transformers from the `test` extra.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCAB = 96
POSITIONS = 160  # enough for several blocks of the blocked attention kernel


@dataclass(frozen=True)
class Sample:
    """The recipe for a tiny model of one Hugging Face architecture."""

    preset: str
    """The preset whose row in the model table reports the parity of this sample; it has the same architecture."""
    model_type: str
    architecture: str
    """Name of the model class in transformers."""
    config: str
    """Name of the config class in transformers."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Arguments of the config class. Sliding windows must be shorter than the sequences that parity is measured on."""
    untied_output: bool = False
    """Whether to untie the output projection: transformers ties it in new T5 models despite `tie_word_embeddings`."""

    def make(self, seed: int = 0) -> Any:
        """Create the model, in evaluation mode."""
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
                if tensor.requires_grad or name == "final_logits_bias":  # the other buffers are constants
                    tensor.add_(_noise_scale(name, tensor) * torch.randn(tensor.shape))
        return model

    def save(self, directory: str | Path, seed: int = 0) -> Any:
        """Make the model and write it with `save_pretrained`."""
        model = self.make(seed)
        model.save_pretrained(directory)
        return model


def _noise_scale(name: str, tensor: Any) -> float:
    """A standard deviation large enough for non-uniform attention and distinct experts, but too small to saturate."""
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
NAMED = {  # classes with names
    "id2label": {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"},
    "label2id": {"O": 0, "B-PER": 1, "I-PER": 2, "B-LOC": 3},
}
GROUPED_QUERY = SHAPE | {"num_key_value_heads": 2}
WIDE_HEADS = GROUPED_QUERY | {"head_dim": 16}  # wider than hidden_size / num_attention_heads


def decoder_samples(name: str, preset: str, model_type: str, stem: str, fields: dict[str, Any]) -> dict[str, Sample]:
    """Samples of a decoder with each of its heads: a language model, a classifier and a tagger."""
    config = f"{stem}Config"
    return {
        name: Sample(preset, model_type, f"{stem}ForCausalLM", config, fields),
        f"{name} classes": Sample(
            preset, model_type, f"{stem}ForSequenceClassification", config, fields | {"num_labels": 3}
        ),
        f"{name} tags": Sample(preset, model_type, f"{stem}ForTokenClassification", config, fields | NAMED),
    }
