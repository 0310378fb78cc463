"""Our train step against transformers' GPT2LMHeadModel with torch's AdamW, in one interleaved run.

    python tests/bench/train.py [--rounds 10] [key=value ...]

Each peer has its own process and takes one step in turn; the best step of each counts. Reports the time and
the peak memory of a step, and how both relate.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

LAYERS, WIDTH, HEADS, VOCAB, ROWS, LENGTH = 6, 384, 6, 8192, 8, 256
PEERS = ("jaxformer", "torch-eager", "torch-compile")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peers", nargs="+", default=PEERS)
    parser.add_argument("--worker")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    if args.worker:
        _serve(_torch_step(args.worker) if args.worker.startswith("torch") else _our_step(args.overrides))
        return
    workers = {peer: _Worker(peer, args.overrides) for peer in args.peers}
    results = {peer: [] for peer in workers}
    for worker in workers.values():
        worker.ask("step")  # the first steps compile and warm up
        worker.ask("step")
        worker.ask("reset")
    for _ in range(args.rounds):
        for peer, worker in workers.items():
            results[peer].append(worker.ask("step")["seconds"])
    memory = {peer: worker.ask("memory") for peer, worker in workers.items()}
    torch_best = min((min(r) for peer, r in results.items() if peer.startswith("torch")), default=float("nan"))
    for peer, seconds in results.items():
        ordered = sorted(seconds)
        print(
            f"{peer:14s} best {ordered[0] * 1e3:6.0f} ms  median {ordered[len(ordered) // 2] * 1e3:6.0f} ms  "
            f"speed vs best torch {torch_best / ordered[0]:.2f}x  "
            f"peak {memory[peer]['peak']:5.0f} MiB  above idle {memory[peer]['peak'] - memory[peer]['idle']:5.0f} MiB"
        )


class _Worker:
    """A peer in its own process, asked for one step at a time."""

    def __init__(self, peer: str, overrides: list[str]) -> None:
        command = [sys.executable, __file__, "--worker", peer, *overrides]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, what: str) -> dict[str, float]:
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _serve(step) -> None:
    idle = _memory("VmRSS")
    for line in sys.stdin:
        answer = {}
        if line.strip() == "step":
            answer["seconds"] = step()
        elif line.strip() == "reset":
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak of compilation
        else:
            answer = {"peak": _memory("VmHWM"), "idle": idle}
        print(json.dumps(answer), flush=True)


def _memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def _our_step(overrides: list[str]):
    from jaxformer.bench.train import TrainBench, default_config
    from jaxformer.config import apply_overrides

    return TrainBench(apply_overrides(default_config(), overrides)).step


def _torch_step(peer: str):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(2)
    config = GPT2Config(
        n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCAB, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
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


if __name__ == "__main__":
    main()
