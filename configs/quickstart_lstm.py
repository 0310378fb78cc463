"""The quickstart with an LSTM instead of the transformer: same data, same number of steps, about as many parameters.

    jaxformer train configs/quickstart_lstm.py

Hardware: 2 CPU cores. Wall time: 1 min 10 s on an AMD EPYC with AVX-512, tokenizer and evaluation included.
Expect: held-out perplexity 95 per token (vocabulary of 2048), 2.47 bits per byte (library of Python 3.11); the
transformer of configs/quickstart.py reaches 36 and 1.94.
"""

from quickstart import config as quickstart

from jaxformer.config import Linear, OptimConfig, RunConfig
from jaxformer.models.rnn import rnn


def config() -> RunConfig:
    return quickstart().replace(
        model=rnn(cell="lstm", num_layers=2, embed_dim=192, dim=224, vocab_size=2048),
        optim=OptimConfig(learning_rate=5e-3, schedule=Linear(warmup_steps=80), weight_decay=0.1),
    )
