"""The quickstart's data and budget with an LSTM of about as many parameters in place of the transformer.

    jaxformer train configs/quickstart_lstm.py

Hardware: 2 CPU cores. Wall time: 15 min 5 s beside other work on both cores (7 min 51 s of CPU time of its own),
tokenizer and evaluation included.
Expect: held-out perplexity 109 over 2048 pieces, 2.54 bits per byte (Python 3.11's library); the transformer of
configs/quickstart.py reaches 92 and 2.45.
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
from jaxformer.models.rnn import rnn


def config() -> RunConfig:
    return RunConfig(
        model=rnn(cell="lstm", num_layers=2, embed_dim=320, dim=320, vocab_size=2048),
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
