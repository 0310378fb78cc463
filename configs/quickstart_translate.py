"""An encoder-decoder that converts dates written in eight languages to ISO 8601.

    jaxformer train configs/quickstart_translate.py

Hardware: 2 CPU cores. Wall time: 1 min 11 s on an AMD EPYC with AVX-512, evaluation included.
Expect: 99.5 % exact match on 1000 held-out dates.
"""

from jaxformer.config import (
    AdamW,
    ByteTokenizer,
    CheckpointConfig,
    DataConfig,
    DatesSource,
    EvaluateConfig,
    ExactMatch,
    InverseSqrt,
    OptimConfig,
    Perplexity,
    RunConfig,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.models.vaswani import vaswani


def config() -> RunConfig:
    return RunConfig(
        model=vaswani(num_layers=2, embed_dim=128, num_heads=4, mlp_dim=512, vocab_size=259, dropout=0.0),
        data=DataConfig(
            train=DatesSource(split="train"),
            heldout=DatesSource(split="heldout", num_examples=1000),
            tokenizer=ByteTokenizer(),
            objective=Seq2Seq(input_length=160),
            length=48,
            batch_size=16,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-9),
            learning_rate=2e-3,
            schedule=InverseSqrt(warmup_steps=200),
            ema_decay=0.98,  # instead of averaging the last checkpoints, as arXiv:1706.03762 does
        ),
        train=TrainConfig(steps=800, label_smoothing=0.1),
        checkpoint=CheckpointConfig(every=400),
        evaluate=EvaluateConfig(
            every=400,
            metrics=(Perplexity(), ExactMatch(num_examples=1000)),
            prompts=("Tuesday, 3 March 1987", "le 14 juillet 2031", "24. Dezember 1999"),
            max_new_tokens=16,
        ),
    )
