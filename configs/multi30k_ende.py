"""English to German translation of image captions: a small encoder-decoder on Multi30k (task 1, raw text).

JAXFORMER_DATA=DIR jaxformer train configs/multi30k_ende.py
"""

import os

from jaxformer.config import (
    AdamW,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    InverseSqrt,
    OptimConfig,
    ParallelSource,
    Perplexity,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.models.vaswani import vaswani

ROOT = os.environ.get("JAXFORMER_DATA", "data") + "/multi30k"


def pairs(split: str) -> ParallelSource:
    return ParallelSource(inputs=f"{ROOT}/{split}.en.gz", targets=f"{ROOT}/{split}.de.gz")


def config() -> RunConfig:
    return RunConfig(
        model=vaswani(
            vocab_size=8000,
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            mlp_dim=256,
            placement="pre",
            dropout=0.3,
        ),
        data=DataConfig(
            train=pairs("train"),
            heldout=pairs("val"),
            tokenizer=SentencePieceTokenizer(byte_fallback=False, train_bytes=16_000_000),
            objective=Seq2Seq(input_length=128),
            length=128,
            batch_size=32,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-9),
            learning_rate=5e-3,
            schedule=InverseSqrt(warmup_steps=500),
        ),
        train=TrainConfig(steps=6000, label_smoothing=0.1),
        checkpoint=CheckpointConfig(every=250, keep_last=10),
        evaluate=EvaluateConfig(
            every=500,
            metrics=(Perplexity(),),
            prompts=("A man in an orange hat staring at something.",),
        ),
    )
