"""A tiny run, as written before config.json had a version."""

from jaxformer.config import (
    ByteTokenizer,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    MemorySource,
    OptimConfig,
    RunConfig,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.models.vaswani import vaswani

PAIRS = tuple((f"number {i}", str(i)) for i in range(24))


def config() -> RunConfig:
    source = MemorySource(pairs=PAIRS)
    return RunConfig(
        model=vaswani(num_layers=2, embed_dim=8, num_heads=2, mlp_dim=16, vocab_size=259, dropout=0.1),
        data=DataConfig(
            train=source,
            heldout=source,
            tokenizer=ByteTokenizer(),
            objective=Seq2Seq(input_length=24),
            length=16,
            batch_size=8,
        ),
        optim=OptimConfig(learning_rate=1e-3, ema_decay=0.9),
        train=TrainConfig(steps=2, log_every=1),
        checkpoint=CheckpointConfig(every=2),
        evaluate=EvaluateConfig(every=2, exact_match=8, prompts=("number 3",), max_new_tokens=4),
    )
