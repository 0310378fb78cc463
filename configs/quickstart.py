"""A small language model on the source code of the Python standard library.

    jaxformer train configs/quickstart.py

Hardware: 2 CPU cores. Wall time: 1 min 24 s on an AMD EPYC with AVX-512, tokenizer and evaluation included.
Expect: held-out perplexity 36 per token (vocabulary of 2048), 1.94 bits per byte (library of Python 3.11).
"""

from jaxformer.config import (
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    Linear,
    Muon,
    OptimConfig,
    RunConfig,
    SentencePieceTokenizer,
    StdlibSource,
    TrainConfig,
)
from jaxformer.models.llama import llama


def config() -> RunConfig:
    return RunConfig(
        model=llama(
            num_layers=4, embed_dim=128, num_heads=4, mlp_dim=384, vocab_size=2048, context_length=512, tied=True
        ),
        data=DataConfig(
            train=StdlibSource(split="train"),
            heldout=StdlibSource(split="heldout"),
            tokenizer=SentencePieceTokenizer(algorithm="bpe"),
            length=256,
            batch_size=8,
        ),
        optim=OptimConfig(algorithm=Muon(), learning_rate=0.02, schedule=Linear(warmup_steps=80), weight_decay=0.1),
        train=TrainConfig(steps=700),
        checkpoint=CheckpointConfig(every=350),
        evaluate=EvaluateConfig(
            every=100,
            batches=8,
            prompts=("def parse(", "class Queue:\n    def put(", "    if not isinstance("),
            max_new_tokens=80,
            temperature=0.7,
            top_p=0.9,
        ),
    )
