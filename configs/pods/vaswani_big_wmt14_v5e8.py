"""The big transformer of "Attention Is All You Need" for WMT 2014 English-German, on 8 TPU v5e chips.

    jaxformer preflight configs/pods/vaswani_big_wmt14_v5e8.py
    jaxformer train configs/pods/vaswani_big_wmt14_v5e8.py

Hardware: v5e-8, 2 x 4 chips.
Preflight: peak 5.26 GiB of 15.75 GiB per device, 1.6 GiB on the wire per step. We have not
trained it.
Reads wmt14/{train,valid}.{en,de}, one sentence per line; pairs are packed into rows of 256 + 256 tokens.
"""

from jaxformer.config import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    InverseSqrt,
    MeshConfig,
    OptimConfig,
    ParallelSource,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.models import preset


def pairs(split: str) -> ParallelSource:
    return ParallelSource(inputs=f"wmt14/{split}.en", targets=f"wmt14/{split}.de")


def config() -> RunConfig:
    return RunConfig(
        model=preset("vaswani-big"),
        data=DataConfig(
            train=pairs("train"),
            heldout=pairs("valid"),
            tokenizer=SentencePieceTokenizer(),
            objective=Seq2Seq(input_length=256),
            length=256,
            batch_size=128,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-9), learning_rate=7e-4, schedule=InverseSqrt(warmup_steps=4000)
        ),
        train=TrainConfig(steps=300_000, label_smoothing=0.1),
        mesh=MeshConfig(data=8, topology="v5e-8"),
        checkpoint=CheckpointConfig(every=2000, keep_last=20),
        evaluate=EvaluateConfig(every=2000),
    )
