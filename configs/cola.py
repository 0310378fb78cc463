"""Linguistic acceptability (CoLA) with and without masked-LM pre-training on WikiText-2, for three seeds each.

    JAXFORMER_DATA=DIR python configs/results/run.py cola     # all runs, then results/cola.json and RESULTS.md
    JAXFORMER_DATA=DIR jaxformer train configs/cola.py        # only the pre-training

Reads DIR/wikitext-2/wiki.{train,valid}.txt.xz (WikiText-2, Merity et al. 2016, one paragraph per line) and
DIR/cola/in_domain_{train,dev}.tsv (the raw public files of nyu-mll/CoLA-baselines).
This experiment has not been finished yet.
"""

import os
from collections.abc import Callable

from jaxformer.config import (
    CheckpointConfig,
    Classification,
    Classify,
    DataConfig,
    DirectoryTokenizer,
    EvaluateConfig,
    Linear,
    Masked,
    ModelConfig,
    Muon,
    OptimConfig,
    RunConfig,
    SentencePieceTokenizer,
    StartConfig,
    TextSource,
    TrainConfig,
    TsvSource,
)
from jaxformer.models.modernbert import modernbert

ROOT = os.environ.get("JAXFORMER_DATA", "data")
PRETRAINED = "runs/cola_pretraining"
SEEDS = (0, 1, 2)


def model(dropout: float = 0.0) -> ModelConfig:
    """A small ModernBERT with both heads: the masked-LM head is trained first, then the classifier."""
    return modernbert(
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        mlp_dim=512,
        vocab_size=8000,
        context_length=128,
        local=[False] * 4,
        masked_lm=True,
        num_classes=2,
        labels=("0", "1"),
        pooling="mean",
        dropout=dropout,
        classifier_dropout=dropout,
    )


def config() -> RunConfig:
    """Pre-training on WikiText-2."""

    def text(split: str) -> TextSource:
        return TextSource(paths=f"{ROOT}/wikitext-2/wiki.{split}.txt.xz", document="line")

    return RunConfig(
        workdir=PRETRAINED,
        model=model(),
        data=DataConfig(
            train=text("train"),
            heldout=text("valid"),
            tokenizer=SentencePieceTokenizer(train_bytes=12_000_000),
            objective=Masked(rate=0.3),
            length=128,
            batch_size=16,
        ),
        optim=OptimConfig(algorithm=Muon(), learning_rate=0.02, schedule=Linear(warmup_steps=100), weight_decay=0.1),
        train=TrainConfig(steps=4000),
        checkpoint=CheckpointConfig(every=1000),
        evaluate=EvaluateConfig(every=500),
    )


def classifier(seed: int, pretrained: bool) -> RunConfig:
    """Training on CoLA, from the pre-trained weights or from random ones."""

    def sentences(split: str) -> TsvSource:
        return TsvSource(paths=f"{ROOT}/cola/in_domain_{split}.tsv", text=3, label=1)

    return RunConfig(
        workdir=f"runs/cola_{'pretrained' if pretrained else 'scratch'}_{seed}",
        seed=seed,
        model=model(dropout=0.1),
        data=DataConfig(
            train=sentences("train"),
            heldout=sentences("dev"),
            tokenizer=DirectoryTokenizer(path=PRETRAINED),
            objective=Classify(),
            length=32,
            batch_size=32,
            too_long="truncate",
        ),
        optim=OptimConfig(learning_rate=1e-3, schedule=Linear(warmup_steps=100), weight_decay=0.01, ema_decay=0.99),
        train=TrainConfig(steps=2400, start=StartConfig(path=PRETRAINED) if pretrained else None),
        checkpoint=CheckpointConfig(every=800, keep_best=0),
        evaluate=EvaluateConfig(every=200, metrics=(Classification(),)),
    )


def experiment(train: Callable):
    from results.run import Result, curve

    train(config())
    final, curves = {}, {}
    for pretrained in (True, False):
        arm, values = "with pre-training" if pretrained else "without", []
        for seed in SEEDS:
            run = classifier(seed, pretrained)
            train(run)
            points = curve(run.workdir, "matthews")
            curves[f"{arm}, seed {seed}"] = points
            values.append(100 * points[-1][1])
        final[arm] = values
    means = {arm: sum(values) / len(values) for arm, values in final.items()}
    ranges = {arm: max(values) - min(values) for arm, values in final.items()}
    gain = means["with pre-training"] - means["without"]
    return Result(
        title="CoLA: what masked-LM pre-training adds",
        claim=(
            f"Pre-training on WikiText-2 changes the Matthews correlation on the in-domain dev set from "
            f"{means['without']:.1f} to {means['with pre-training']:.1f} (x 100, means of {len(SEEDS)} seeds after the "
            f"last step): {gain:+.1f}, where the larger range over seeds is {max(ranges.values()):.1f}."
        ),
        columns=("", *(f"seed {seed}" for seed in SEEDS), "mean", "range"),
        rows=[
            (arm, *(f"{value:.1f}" for value in values), f"{means[arm]:.1f}", f"{ranges[arm]:.1f}")
            for arm, values in final.items()
        ],
        curves=curves,
        axes=("step", "Matthews correlation on the dev set"),
    )
