"""A small language model trained on the source code of the Python standard library.

    jaxformer train configs/quickstart.py

Hardware: 2 CPU cores. Wall time: 3 min 28 s, tokenizer and evaluation included.
Expect: held-out perplexity 92 over 2048 pieces, 2.45 bits per byte (Python 3.11's library).
"""

from jaxformer.config import (
    CheckpointConfig,
    Cosine,
    DataConfig,
    EvaluateConfig,
    OptimConfig,
    RunConfig,
    SentencePieceTokenizer,
    StdlibSource,
    TrainConfig,
)
from jaxformer.models.gpt2 import gpt2


def config() -> RunConfig:
    return RunConfig(
        model=gpt2(num_layers=4, embed_dim=192, num_heads=3, vocab_size=2048, max_length=512),
        data=DataConfig(
            train=StdlibSource(split="train"),
            heldout=StdlibSource(split="heldout"),
            tokenizer=SentencePieceTokenizer(algorithm="bpe"),
            length=256,
            batch_size=4,
        ),
        optim=OptimConfig(learning_rate=3e-3, schedule=Cosine(warmup_steps=80), weight_decay=0.1),
        train=TrainConfig(steps=800),
        checkpoint=CheckpointConfig(every=200),
        evaluate=EvaluateConfig(
            every=200,
            batches=16,
            prompts=("def parse(", "class Queue:\n", "import os\n"),
            max_new_tokens=80,
            temperature=0.8,
            top_p=0.9,
        ),
    )
