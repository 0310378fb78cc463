"""T5 v1.1 XXL on 256 TPU v4 chips (512 cores), span corruption of 512 tokens.

    jaxformer preflight configs/pods/t5_xxl_v4_512.py
    jaxformer train configs/pods/t5_xxl_v4_512.py

Hardware: v4-512, 4 x 8 x 8 chips.
Preflight: peak 2.90 GiB of 31.50 GiB per device, 78.6 GiB on the wire per step. We have not
trained it.
"""

from jaxformer.config import (
    Adafactor,
    DataConfig,
    DirectoryTokenizer,
    InverseSqrt,
    MeshConfig,
    OptimConfig,
    RunConfig,
    Span,
    TextSource,
    TrainConfig,
)
from jaxformer.models import preset


def config() -> RunConfig:
    return RunConfig(
        model=preset("t5v1.1-xxl"),
        data=DataConfig(
            train=TextSource(paths="corpus/train/*.txt"),
            heldout=TextSource(paths="corpus/heldout/*.txt"),
            tokenizer=DirectoryTokenizer(path="tokenizers/t5"),
            objective=Span(input_length=512),
            length=128,
            batch_size=2048,
        ),
        optim=OptimConfig(algorithm=Adafactor(), learning_rate=1e-2, schedule=InverseSqrt(warmup_steps=10_000)),
        train=TrainConfig(steps=1_000_000, remat="full", z_loss=1e-4),
        mesh=MeshConfig(data=1, fsdp=256, topology="v4-512"),
    )
