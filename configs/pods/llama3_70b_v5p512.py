"""Llama 3.1 70B on 256 TPU v5p chips (512 cores): one sequence of 8192 tokens per chip.

    jaxformer preflight configs/pods/llama3_70b_v5p512.py
    jaxformer train configs/pods/llama3_70b_v5p512.py

Hardware: v5p-512, 4 x 8 x 8 chips.
Preflight: peak 19.25 GiB of 93.52 GiB per device, 497.9 GiB on the wire per step. We have not
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
        model=preset("llama3.1-70b"),
        data=DataConfig(
            train=TextSource(paths="corpus/train/*.txt"),
            heldout=TextSource(paths="corpus/heldout/*.txt"),
            tokenizer=DirectoryTokenizer(path="tokenizers/llama3"),
            length=8192,
            batch_size=256,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b2=0.95), learning_rate=1.5e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1
        ),
        train=TrainConfig(steps=100_000, remat="full"),
        mesh=MeshConfig(data=1, fsdp=256, topology="v5p-512"),
    )
