"""ModernBERT large on 64 TPU v6e chips: 30 % masks, rows of 1024 tokens.

    jaxformer preflight configs/pods/modernbert_large_v6e64.py
    jaxformer train configs/pods/modernbert_large_v6e64.py

Hardware: v6e-64, 8 x 8 chips.
Preflight: peak 2.63 GiB of 31.50 GiB per device, 2.6 GiB on the wire per step. We have not
trained it.
"""

from jaxformer.config import (
    AdamW,
    DataConfig,
    DirectoryTokenizer,
    Masked,
    MeshConfig,
    OptimConfig,
    RunConfig,
    TextSource,
    TrainConfig,
    WarmupStableDecay,
)
from jaxformer.models import preset


def config() -> RunConfig:
    return RunConfig(
        model=preset("modernbert-large"),
        data=DataConfig(
            train=TextSource(paths="corpus/train/*.txt"),
            heldout=TextSource(paths="corpus/heldout/*.txt"),
            tokenizer=DirectoryTokenizer(path="tokenizers/modernbert"),
            objective=Masked(rate=0.3),
            length=1024,
            batch_size=1024,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-6),
            learning_rate=5e-4,
            schedule=WarmupStableDecay(warmup_steps=2000, decay_steps=20_000),
            weight_decay=1e-5,
        ),
        train=TrainConfig(steps=200_000, remat="full"),
        mesh=MeshConfig(data=8, fsdp=8, topology="v6e-64"),
    )
