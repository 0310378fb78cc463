"""Our train step against transformers on torch with AdamW, for a GPT-2-like and a Llama-like model.

    python tests/bench/train.py [--shapes gpt2 llama] [--rounds 10] [key=value ...]

Each peer runs in its own process. The processes take turns to run one step, so that all of them see the same machine
load, and the best step of each counts. Reports the time of a step, also relative to torch, and the peak memory.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

LAYERS, WIDTH, HEADS, GATED_WIDTH, VOCAB, ROWS, LENGTH = 6, 384, 6, 1024, 8192, 8, 256
SHAPES = ("gpt2", "llama")
PEERS = ("jaxformer", "torch-eager", "torch-compile")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--worker", nargs=2, metavar=("SHAPE", "PEER"), help="internal: run as the process of one peer")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    if args.worker:
        shape, peer = args.worker
        _serve(_our_step(shape, args.overrides) if peer == "jaxformer" else _torch_step(shape, peer))
        return
    for shape in args.shapes:
        _compare(shape, args.peers, args.rounds, args.overrides)


def _compare(shape: str, peers: list[str], rounds: int, overrides: list[str]) -> None:
    workers = {peer: _Worker(shape, peer, overrides) for peer in peers}
    results = {peer: [] for peer in workers}
    for worker in workers.values():
        worker.ask("step")  # the first steps compile and warm up
        worker.ask("step")
        worker.ask("reset")
    for _ in range(rounds):
        for peer, worker in workers.items():
            results[peer].append(worker.ask("step")["seconds"])
    memory = {peer: worker.ask("memory") for peer, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    torch_best = min((min(r) for peer, r in results.items() if peer.startswith("torch")), default=float("nan"))
    for peer, seconds in results.items():
        ordered = sorted(seconds)
        print(
            f"{shape:6s} {peer:14s} best {ordered[0] * 1e3:6.0f} ms  "
            f"median {ordered[len(ordered) // 2] * 1e3:6.0f} ms  "
            f"speed vs best torch {torch_best / ordered[0]:.2f}x  "
            f"peak {memory[peer]['peak']:5.0f} MiB  above idle {memory[peer]['peak'] - memory[peer]['idle']:5.0f} MiB",
            flush=True,
        )


class _Worker:
    """A peer in its own process, which runs one step per request."""

    def __init__(self, shape: str, peer: str, overrides: list[str]) -> None:
        command = [sys.executable, __file__, *overrides, "--worker", shape, peer]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, what: str) -> dict[str, float]:
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def _serve(step: Callable[[], float]) -> None:
    idle = _memory("VmRSS")
    for line in sys.stdin:
        answer = {}
        if line.strip() == "step":
            answer["seconds"] = step()
        elif line.strip() == "reset":
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak, which compilation had raised
        else:
            answer = {"peak": _memory("VmHWM"), "idle": idle}
        print(json.dumps(answer), flush=True)


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _our_step(shape: str, overrides: list[str]) -> Callable[[], float]:
    from jaxformer.bench.train import TrainBench, default_config
    from jaxformer.config import apply_overrides
    from jaxformer.models.llama import llama

    config = default_config()
    if shape == "llama":
        model = llama(
            num_layers=LAYERS, embed_dim=WIDTH, num_heads=HEADS, mlp_dim=GATED_WIDTH, vocab_size=VOCAB,
            context_length=LENGTH,
        )  # fmt: skip
        config = config.model_copy(update={"model": model})
    return TrainBench(apply_overrides(config, overrides)).step


def _torch_step(shape: str, peer: str) -> Callable[[], float]:
    import torch

    torch.set_num_threads(2)
    model = (_torch_gpt2() if shape == "gpt2" else _torch_llama()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    forward = torch.compile(model) if peer == "torch-compile" else model
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    def step() -> float:
        started = time.perf_counter()
        loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        return time.perf_counter() - started

    return step


def _torch_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _torch_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        intermediate_size=GATED_WIDTH, vocab_size=VOCAB, max_position_embeddings=LENGTH, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
