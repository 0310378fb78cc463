"""Gemma 2 9B on 256 TPU v6e chips: soft-capped logits, local and global layers, 256,000 tokens.

    jaxformer preflight configs/pods/gemma2_9b_v6e256.py
    jaxformer train configs/pods/gemma2_9b_v6e256.py

Hardware: v6e-256, 16 x 16 chips.
Preflight: peak 4.74 GiB of 31.50 GiB per device, 55.0 GiB on the wire per step. We have not
trained it.
"""

from jaxformer.config import (
    AdamW,
    Cosine,
    DataConfig,
    DirectoryTokenizer,
    MeshConfig,
    OptimConfig,
    RunConfig,
    TextSource,
    TrainConfig,
)
from jaxformer.models import preset


def config() -> RunConfig:
    return RunConfig(
        model=preset("gemma2-9b"),
        data=DataConfig(
            train=TextSource(paths="corpus/train/*.txt"),
            heldout=TextSource(paths="corpus/heldout/*.txt"),
            tokenizer=DirectoryTokenizer(path="tokenizers/gemma2"),
            length=8192,
            batch_size=256,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b2=0.95), learning_rate=2e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1
        ),
        train=TrainConfig(steps=100_000, remat="full"),
        mesh=MeshConfig(data=1, fsdp=256, topology="v6e-256"),
    )
