"""Generation speed against transformers and CTranslate2, in one interleaved run on two threads.

    pip install ctranslate2
    python tests/bench/decode.py [--rounds 5] [--cases gpt2-1 gpt2-8 greedy-1 greedy-32 beam-1 beam-32 int8-1]

Each library runs in its own process. The processes take turns to generate a batch, and the best time of each counts.
All use the same random weights: transformers initialises them, jaxformer loads them, and CTranslate2 converts them.
Also reports the fraction of output sequences that are identical to those of jaxformer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

THREADS = 2
# name: model, batch, beams, prompt tokens, new tokens, weights of jaxformer
CASES = {
    "gpt2-1": ("gpt2", 1, 1, 32, 64, None),
    "gpt2-8": ("gpt2", 8, 1, 32, 64, None),
    "int8-1": ("gpt2", 1, 1, 32, 64, "int8"),
    "greedy-1": ("marian", 1, 1, 20, 24, None),
    "greedy-32": ("marian", 32, 1, 20, 24, None),
    "beam-1": ("marian", 1, 4, 20, 24, None),
    "beam-32": ("marian", 32, 4, 20, 24, None),
}
VOCAB = {"gpt2": 50257, "marian": 58101}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--worker", nargs=2, metavar=("PEER", "CASE"))
    parser.add_argument("--models", type=Path)
    args = parser.parse_args()
    if args.worker:
        _serve(*args.worker, args.models)
        return
    with tempfile.TemporaryDirectory() as directory:
        models = args.models or Path(directory)
        _make_models(models, {CASES[name][0] for name in args.cases})
        for name in args.cases:
            _compare(name, models, args.rounds)


def _compare(name: str, models: Path, rounds: int) -> None:
    model, batch, beams, prompt, new, weights = CASES[name]
    peers = ["jaxformer", "transformers", *(["ctranslate2"] if model == "marian" else [])]
    if weights is not None:
        peers = ["jaxformer", "jaxformer-float32"]
    workers = {peer: _Worker(peer, name, models) for peer in peers}
    outputs = {peer: worker.ask()["output"] for peer, worker in workers.items()}  # the first round compiles
    seconds = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer, worker in workers.items():
            seconds[peer].append(worker.ask()["seconds"])
    ours = min(seconds["jaxformer"])
    print(f"{name}: {model}, batch {batch}, beams {beams}, {prompt} + {new} tokens, {weights or 'float32'}")
    for peer, times in seconds.items():
        agree = np.mean([a == b for a, b in zip(outputs[peer], outputs["jaxformer"], strict=True)])
        print(
            f"  {peer:18s} best {min(times) * 1e3:7.0f} ms, median {np.median(times) * 1e3:7.0f} ms, "
            f"{batch * new / min(times):7.1f} tokens/s; jaxformer is {min(times) / ours:.2f}x as fast; "
            f"identical outputs {agree:.0%}",
            flush=True,
        )
    for worker in workers.values():
        worker.close()


class _Worker:
    """A library in its own process that generates one batch per request."""

    def __init__(self, peer: str, case: str, models: Path) -> None:
        threads = {name: str(THREADS) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", peer, case, "--models", str(models)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"} | threads,
        )

    def ask(self) -> dict:
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _serve(peer: str, case: str, models: Path) -> None:
    model, batch, beams, prompt, new, weights = CASES[case]
    ids = np.random.default_rng(0).integers(5, VOCAB[model] - 1, (batch, prompt)).tolist()
    make = {"transformers": _transformers, "ctranslate2": _ctranslate2}.get(peer, _jaxformer)
    generate = make(models / model, ids, beams, new, None if peer.endswith("float32") else weights)
    for _ in sys.stdin:
        started = time.perf_counter()
        output = generate()
        print(json.dumps({"seconds": time.perf_counter() - started, "output": output}), flush=True)


def _jaxformer(directory: Path, ids: list[list[int]], beams: int, new: int, weights: str | None):
    import jaxformer as jf

    run = jf.load(directory, weights=weights)
    settings = {"min_new_tokens": new, "num_beams": beams, "batch_size": len(ids) * beams}
    return lambda: jf.generate(run, ids, new, **settings)


def _transformers(directory: Path, ids: list[list[int]], beams: int, new: int, weights: None):
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.set_num_threads(THREADS)
    kind = AutoModelForSeq2SeqLM if directory.name == "marian" else AutoModelForCausalLM
    model = kind.from_pretrained(directory).eval()
    inputs = torch.tensor(ids)
    skip = 1 if directory.name == "marian" else inputs.shape[1]
    options = {"max_new_tokens": new, "min_new_tokens": new, "num_beams": beams, "do_sample": False}

    @torch.inference_mode()
    def generate() -> list[list[int]]:
        outputs = model.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **options)
        return outputs[:, skip:].tolist()

    return generate


def _ctranslate2(directory: Path, ids: list[list[int]], beams: int, new: int, weights: None):
    import ctranslate2

    translator = ctranslate2.Translator(
        str(directory / "ctranslate2"), device="cpu", compute_type="float32", inter_threads=1, intra_threads=THREADS
    )
    tokens = list(json.loads((directory / "vocab.json").read_text()))
    sources = [[tokens[i] for i in row] for row in ids]
    index = {token: i for i, token in enumerate(tokens)}
    options = {"beam_size": beams, "max_decoding_length": new, "min_decoding_length": new}

    def generate() -> list[list[int]]:
        results = translator.translate_batch(sources, **options)
        return [[index[token] for token in result.hypotheses[0]] for result in results]

    return generate


# ---------------------------------------------------------------- the same weights for all
def _make_models(directory: Path, names: set[str]) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if "gpt2" in names and not (directory / "gpt2").exists():
        GPT2LMHeadModel(GPT2Config()).save_pretrained(directory / "gpt2")
    if "marian" in names and not (directory / "marian").exists():
        _make_marian(directory / "marian")


def _make_marian(directory: Path) -> None:
    """A model of the size of opus-mt-en-de, with the vocabulary files that the converter of CTranslate2 needs."""
    import ctranslate2
    import sentencepiece
    from transformers import MarianConfig, MarianMTModel

    size = VOCAB["marian"]
    config = MarianConfig(
        vocab_size=size, d_model=512, encoder_layers=6, decoder_layers=6, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, activation_function="swish",
        scale_embedding=True, static_position_embeddings=True, max_position_embeddings=512, pad_token_id=size - 1,
        eos_token_id=0, decoder_start_token_id=size - 1, forced_eos_token_id=None, bos_token_id=0,
    )  # fmt: skip
    model = MarianMTModel(config)
    model.generation_config.bad_words_ids = None
    model.save_pretrained(directory)
    words = ["</s>", "<unk>", *(f"w{i}" for i in range(size - 3)), "<pad>"]
    (directory / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    text = (f"some words number {i}" for i in range(2000))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(directory / "source"), vocab_size=40, minloglevel=2
    )
    (directory / "source.model").rename(directory / "source.spm")
    (directory / "source.vocab").unlink()
    (directory / "target.spm").write_bytes((directory / "source.spm").read_bytes())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MarianTokenizer"}))
    converter = ctranslate2.converters.TransformersConverter(str(directory))
    converter.convert(str(directory / "ctranslate2"), force=True)


if __name__ == "__main__":
    main()
