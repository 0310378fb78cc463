"""Llama 3.1 8B on 256 TPU v5e chips: one sequence of 8192 tokens per chip, all parameters sharded.

    jaxformer preflight configs/pods/llama3_8b_v5e256.py
    jaxformer train configs/pods/llama3_8b_v5e256.py

Hardware: v5e-256, 16 x 16 chips.
Preflight: peak 4.35 GiB of 15.75 GiB per device, 44.7 GiB on the wire per step. We have not
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
        model=preset("llama3.1-8b"),
        data=DataConfig(
            train=TextSource(paths="corpus/train/*.txt"),
            heldout=TextSource(paths="corpus/heldout/*.txt"),
            tokenizer=DirectoryTokenizer(path="tokenizers/llama3"),
            length=8192,
            batch_size=256,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b2=0.95), learning_rate=3e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1
        ),
        train=TrainConfig(steps=100_000, remat="full"),
        mesh=MeshConfig(data=1, fsdp=256, topology="v5e-256"),
    )
