"""English to German translation of image captions: a small encoder-decoder on Multi30k.

    JAXFORMER_DATA=DIR python configs/results/run.py multi30k_ende   # training, averaging, test BLEU, RESULTS.md
    JAXFORMER_DATA=DIR jaxformer train configs/multi30k_ende.py      # only the training

The model has the size of the tiny transformers of the multimodal translation literature, with LayerNorm before each
sub-layer, dropout 0.3, label smoothing 0.1 and a shared SentencePiece vocabulary of 8,000. The last ten checkpoints are
averaged and decoded by beam search. Reads DIR/multi30k/{train,val,test_2016_flickr}.{en,de}.gz (multi30k/dataset,
task 1, raw text).
"""

import os
from collections.abc import Callable
from pathlib import Path

from jaxformer.config import (
    AdamW,
    Bleu,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    InverseSqrt,
    OptimConfig,
    ParallelSource,
    Perplexity,
    RunConfig,
    SentencePieceTokenizer,
    Seq2Seq,
    TrainConfig,
)
from jaxformer.models.vaswani import vaswani

ROOT = os.environ.get("JAXFORMER_DATA", "data") + "/multi30k"


def pairs(split: str) -> ParallelSource:
    return ParallelSource(inputs=f"{ROOT}/{split}.en.gz", targets=f"{ROOT}/{split}.de.gz")


def config() -> RunConfig:
    return RunConfig(
        workdir="runs/multi30k_ende",
        model=vaswani(
            vocab_size=8000,
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            mlp_dim=256,
            placement="pre",
            dropout=0.3,
        ),
        data=DataConfig(
            train=pairs("train"),
            heldout=pairs("val"),
            tokenizer=SentencePieceTokenizer(byte_fallback=False, train_bytes=16_000_000),
            objective=Seq2Seq(input_length=128),
            length=128,
            batch_size=32,
        ),
        optim=OptimConfig(
            algorithm=AdamW(b1=0.9, b2=0.98, eps=1e-9),
            learning_rate=5e-3,
            schedule=InverseSqrt(warmup_steps=500),
        ),
        train=TrainConfig(steps=6000, label_smoothing=0.1),
        checkpoint=CheckpointConfig(every=250, keep_last=10),
        evaluate=EvaluateConfig(
            every=500,
            metrics=(Perplexity(),),
            prompts=("A man in an orange hat staring at something.",),
        ),
    )


def experiment(train: Callable):
    from results.run import Result, curve

    from jaxformer.average import average_run
    from jaxformer.evaluate.report import evaluate

    workdir, averaged = config().workdir, f"{config().workdir}_average"
    train(config())
    if not Path(averaged).exists():
        average_run(workdir, averaged, last=10)
    test = f"data.heldout={pairs('test_2016_flickr').model_dump_json()}"
    rows, bleu, signature = [], {}, ""
    for name, run, num_beams in (
        ("last checkpoint, greedy", workdir, 1),
        ("last checkpoint, 5 beams", workdir, 5),
        ("average of 10 checkpoints, 5 beams", averaged, 5),
    ):
        metrics = ",".join(metric.model_dump_json() for metric in (Perplexity(), Bleu(num_beams=num_beams)))
        values = evaluate(run, [test, f"evaluate.metrics=[{metrics}]"])
        bleu[name], signature = values["bleu"], values["bleu_signature"]
        rows.append((name, f"{values['bleu']:.2f}", f"{values['chrf']:.2f}"))
    return Result(
        title="Multi30k, English to German",
        claim=(
            f"{bleu[rows[-1][0]]:.1f} BLEU on test_2016_flickr with the average of ten checkpoints and beam search "
            f"(sacreBLEU, {signature}); small text-only transformers in the literature have 38 to 41."
        ),
        columns=("", "test BLEU", "test chrF"),
        rows=rows,
        curves={"validation": curve(workdir, "heldout_perplexity")},
        axes=("step", "perplexity on the validation set"),
    )
