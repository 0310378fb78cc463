"""The quickstart with an LSTM of about as many parameters instead of the transformer; same data, same steps.

    jaxformer train configs/quickstart_lstm.py

Hardware: 2 CPU cores. Wall time: 15 min 5 s while other jobs used both cores (7 min 51 s of CPU time), tokenizer and
evaluation included.
Expect: held-out perplexity 109 over 2048 pieces, 2.54 bits per byte (Python 3.11's library); the transformer of
configs/quickstart.py reaches 92 and 2.45.
"""

from quickstart import config as quickstart

from jaxformer.config import RunConfig
from jaxformer.models.rnn import rnn


def config() -> RunConfig:
    return quickstart().replace(model=rnn(cell="lstm", num_layers=2, embed_dim=320, dim=320, vocab_size=2048))
