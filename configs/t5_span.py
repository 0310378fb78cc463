"""Translation with and without span-corruption pre-training, for the same number of translation steps.

    JAXFORMER_DATA=DIR python configs/results/run.py t5_span    # all runs, then results/t5_span.json and RESULTS.md
    JAXFORMER_DATA=DIR jaxformer train configs/t5_span.py       # only the pre-training

Reads DIR/multi30k/{train,val,test_2016_flickr}.{en,de}.gz (multi30k/dataset, task 1, raw). Pre-training reads the
English and the German training sentences as unrelated texts. 46 minutes on one core of an AMD EPYC: 34.6 BLEU from
scratch, 25.2 after pre-training, which does not help here.
"""

import os
from collections.abc import Callable

from jaxformer.config import (
    AdamW,
    Bleu,
    CheckpointConfig,
    DataConfig,
    DirectoryTokenizer,
    EvaluateConfig,
    InverseSqrt,
    ModelConfig,
    OptimConfig,
    ParallelSource,
    Perplexity,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    Span,
    StartConfig,
    TextSource,
    TrainConfig,
)
from jaxformer.models.vaswani import vaswani

ROOT = os.environ.get("JAXFORMER_DATA", "data") + "/multi30k"
PRETRAINED = "runs/t5_span_pretraining"


def model() -> ModelConfig:
    """The model of multi30k_ende.py."""
    return vaswani(vocab_size=8000, num_layers=4, embed_dim=128, num_heads=4, mlp_dim=256, placement="pre", dropout=0.3)


def optimizer() -> OptimConfig:
    return OptimConfig(
        algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-9), learning_rate=5e-3, schedule=InverseSqrt(warmup_steps=500)
    )


def config() -> RunConfig:
    """Span corruption on single sentences of both languages."""

    def sentences(split: str) -> TextSource:
        return TextSource(paths=(f"{ROOT}/{split}.en.gz", f"{ROOT}/{split}.de.gz"), document="line")

    return RunConfig(
        workdir=PRETRAINED,
        model=model(),
        data=DataConfig(
            train=sentences("train"),
            heldout=sentences("val"),
            tokenizer=SentencePieceTokenizer(byte_fallback=False, train_bytes=16_000_000),
            objective=Span(input_length=128),
            length=64,
            batch_size=32,
        ),
        optim=optimizer(),
        train=TrainConfig(steps=1500),
        checkpoint=CheckpointConfig(every=500),
        evaluate=EvaluateConfig(every=500),
    )


def pairs(split: str) -> ParallelSource:
    return ParallelSource(inputs=f"{ROOT}/{split}.en.gz", targets=f"{ROOT}/{split}.de.gz")


def translator(pretrained: bool) -> RunConfig:
    return RunConfig(
        workdir=f"runs/t5_span_{'pretrained' if pretrained else 'scratch'}",
        model=model(),
        data=DataConfig(
            train=pairs("train"),
            heldout=pairs("val"),
            tokenizer=DirectoryTokenizer(path=PRETRAINED),
            objective=Seq2Seq(input_length=128),
            length=128,
            batch_size=32,
        ),
        optim=optimizer(),
        train=TrainConfig(steps=1000, label_smoothing=0.1, start=StartConfig(path=PRETRAINED) if pretrained else None),
        checkpoint=CheckpointConfig(every=500),
        evaluate=EvaluateConfig(every=250, metrics=(Perplexity(), Bleu(every="end", num_examples=1014, num_beams=4))),
    )


def experiment(train: Callable):
    from results.run import Result, curve

    from jaxformer.evaluate.report import evaluate

    train(config())
    rows, curves, bleu = [], {}, {}
    for pretrained in (True, False):
        run, arm = translator(pretrained), "span corruption first" if pretrained else "from scratch"
        train(run)
        values = evaluate(run.workdir, [f"data.heldout={pairs('test_2016_flickr').model_dump_json()}"])
        curves[arm] = curve(run.workdir, "heldout_perplexity")
        bleu[arm] = values["bleu"]
        rows.append((arm, f"{curves[arm][-1][1]:.2f}", f"{values['bleu']:.1f}", f"{values['chrf']:.1f}"))
    steps = translator(True).train.steps
    return Result(
        title="Span corruption before translation",
        claim=(
            f"After {steps} translation steps on Multi30k English-German, the model that was pre-trained by span "
            f"corruption has {bleu['span corruption first']:.1f} BLEU on test_2016_flickr, the one from scratch "
            f"{bleu['from scratch']:.1f}."
        ),
        columns=("start", "val perplexity", "test BLEU", "test chrF"),
        rows=rows,
        curves=curves,
        axes=("translation step", "perplexity on the validation set"),
    )
