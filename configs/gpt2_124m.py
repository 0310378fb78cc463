"""GPT-2 124M on your own text.

    jaxformer show configs/gpt2_124m.py
    jaxformer train configs/gpt2_124m.py data.train.paths='["corpus/*.txt"]' data.heldout.paths='["heldout.txt"]'

Hardware: for one host with accelerators. Wall time and metrics: unknown, we have not trained it.
`show` was run on a laptop-size CPU machine.
"""

from jaxformer.config import Cosine, DataConfig, OptimConfig, RunConfig, TextSource, TrainConfig
from jaxformer.models import preset


def config() -> RunConfig:
    return RunConfig(
        model=preset("gpt2-124m"),
        data=DataConfig(
            train=TextSource(paths=("corpus/*.txt",)),
            heldout=TextSource(paths=("heldout.txt",)),
            length=1024,
            batch_size=480,
        ),
        optim=OptimConfig(learning_rate=6e-4, schedule=Cosine(warmup_steps=2000), weight_decay=0.1),
        train=TrainConfig(steps=100_000, accumulate=1),
    )
