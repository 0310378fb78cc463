"""An Elman RNN, an LSTM and a transformer of the same size as language models of WikiText-2 sentences.

    JAXFORMER_DATA=DIR python configs/results/run.py rnn_vs_transformer   # all runs, then results/ and RESULTS.md
    JAXFORMER_DATA=DIR jaxformer train configs/rnn_vs_transformer.py      # only the transformer

The sizes are those of "The Hundred-Page Language Models Book", which reports a perplexity of 72.23 for the RNN and of
55.19 for the transformer (0.764 times as much) on another corpus. Reads DIR/wikitext-2/wiki.{train,valid}.txt.xz and
Llama 2's SentencePiece model DIR/tokenizers/llama2_tokenizer.model. This experiment has not been finished yet.
"""

import os
from collections.abc import Callable
from typing import Literal

from jaxformer.config import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    CheckpointConfig,
    Constant,
    DataConfig,
    EarlyStoppingConfig,
    EvaluateConfig,
    HeadConfig,
    MlpConfig,
    ModelConfig,
    NormConfig,
    OptimConfig,
    Rope,
    RunConfig,
    SentencePieceTokenizer,
    StackConfig,
    TextSource,
    TrainConfig,
)
from jaxformer.models.rnn import rnn

ROOT = os.environ.get("JAXFORMER_DATA", "data")
WIDTH, VOCAB_SIZE, LENGTH = 128, 32_000, 30
EPOCH = 688  # steps: 88,017 sentences in batches of 128
Name = Literal["elman", "lstm", "transformer"]


def transformer() -> ModelConfig:
    """Two blocks with RMSNorm before each sub-layer, RoPE, a ReLU MLP with biases, and an untied output."""
    norm = NormConfig(kind="rms", eps=1e-6)
    block = BlockConfig(
        attention=AttentionConfig(num_heads=8, head_dim=WIDTH // 8, causal=True, position=Rope()),
        mlp=MlpConfig(dim=512, activation="relu", bias=True),
        norm=norm,
    )
    return ModelConfig(
        vocab_size=VOCAB_SIZE,
        embed_dim=WIDTH,
        decoder=StackConfig(num_layers=2, pattern=(block,), final_norm=norm),
        head=HeadConfig(tied=False),
    )


def run_config(name: Name) -> RunConfig:
    def sentences(split: str) -> TextSource:
        return TextSource(paths=f"{ROOT}/wikitext-2/wiki.{split}.txt.xz", document="sentence")

    is_recurrent = name != "transformer"
    sizes = {"num_layers": 2, "embed_dim": WIDTH, "dim": WIDTH, "vocab_size": VOCAB_SIZE, "tied": False}
    return RunConfig(
        workdir=f"runs/rnn_vs_transformer_{name}",
        model=rnn(cell=name, **sizes) if is_recurrent else transformer(),
        data=DataConfig(
            train=sentences("train"),
            heldout=sentences("valid"),
            tokenizer=SentencePieceTokenizer(path=f"{ROOT}/tokenizers/llama2_tokenizer.model"),
            length=LENGTH,
            batch_size=128,
            pack=False,
            too_long="truncate",
        ),
        optim=OptimConfig(algorithm=AdamW(b2=0.999), learning_rate=1e-3, schedule=Constant(), weight_decay=0.01),
        train=TrainConfig(steps=8 * EPOCH, loss_chunks=15, early_stopping=EarlyStoppingConfig(patience=1)),
        checkpoint=CheckpointConfig(every=EPOCH),
        evaluate=EvaluateConfig(every=EPOCH),
    )


def config() -> RunConfig:
    return run_config("transformer")


def experiment(train: Callable):
    from results.run import Result, curve

    from jaxformer.layers import num_params

    names: tuple[Name, ...] = ("elman", "lstm", "transformer")
    curves, best = {}, {}
    for name in names:
        train(run_config(name))
        curves[name] = curve(run_config(name).workdir, "heldout_perplexity")
        best[name] = min(curves[name], key=lambda point: point[1])
    ratio = best["transformer"][1] / best["elman"][1]
    return Result(
        title="Elman RNN, LSTM and transformer",
        claim=(
            f"At its best validation epoch, the transformer has {ratio:.3f} times the perplexity of the Elman RNN "
            f"({best['transformer'][1]:.2f} and {best['elman'][1]:.2f}); the book reports 0.764 on another corpus."
        ),
        columns=("model", "parameters", "best epoch", "validation perplexity"),
        rows=[
            (name, f"{num_params(run_config(name).model):,}", round(best[name][0] / EPOCH), f"{best[name][1]:.2f}")
            for name in names
        ],
        curves=curves,
        axes=("step", "perplexity on the validation set"),
    )
