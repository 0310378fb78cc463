"""Llama 3 8B with FSDP: parameters sharded over 64 devices.

    jaxformer show configs/llama3_8b.py

Hardware: for 64 accelerators. Wall time and metrics: unknown, we have not trained it. `show` was run on a laptop-size
CPU machine; it allocates no arrays.
"""

from jaxformer.config import Cosine, DataConfig, MeshConfig, OptimConfig, RunConfig, TextSource, TrainConfig
from jaxformer.models import preset


def config() -> RunConfig:
    return RunConfig(
        model=preset("llama3-8b"),
        data=DataConfig(train=TextSource(paths=("corpus/*.txt",)), length=8192, batch_size=64),
        optim=OptimConfig(learning_rate=3e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1),
        train=TrainConfig(steps=100_000, remat="full"),
        mesh=MeshConfig(data=1, fsdp=64),
    )
