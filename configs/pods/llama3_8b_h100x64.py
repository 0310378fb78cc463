"""Llama 3.1 8B on 64 H100: one sequence of 8192 tokens per GPU, all parameters sharded.

    jaxformer preflight configs/pods/llama3_8b_h100x64.py
    jaxformer train configs/pods/llama3_8b_h100x64.py

Hardware: h100-64, 8 hosts of 8 GPUs.
Preflight: peak 7.33 GiB of 68.55 GiB per device, 41.1 GiB on the wire per step. We have not
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
            batch_size=64,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b2=0.95), learning_rate=3e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1
        ),
        train=TrainConfig(steps=100_000, remat="full"),
        mesh=MeshConfig(data=1, fsdp=64, topology="h100-64"),
    )
