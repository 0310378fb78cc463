"""Everything an evaluation says about a run: held-out metrics, exact match, samples."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxformer.config import apply_overrides
from jaxformer.convert.directory import is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data import PackedSet, load_heldout, make_loader
from jaxformer.decode.requests import generate
from jaxformer.errors import UserError
from jaxformer.evaluate.exact_match import exact_match
from jaxformer.evaluate.heldout import eval_step, heldout_metrics
from jaxformer.run import Run, load, quantized_run
from jaxformer.sharding import check_batch, make_mesh

FILE_NAME = "evaluation.json"


def evaluate(
    path: str | Path, overrides: tuple[str, ...] | list[str] = (), *, weights: str | None = None
) -> dict[str, float]:
    """Metrics of the run in a directory on the held-out data of its config; also written to its evaluation.json.

    Args:
      weights: "int8" measures the model with quantized weights too, as `int8_*`.
    """
    directory = local_directory(path)
    run = load(directory)
    run = replace(run, config=apply_overrides(run.config, overrides))
    run.config.check_data()
    if run.config.data.heldout is None:
        raise UserError('data.heldout is none: set it, such as data.heldout=\'{"kind":"text","paths":[...]}\'')
    if run.tokenizer is None:
        raise UserError(f"'{directory}' has no tokenizer, and texts cannot be read without: put its files there")
    check_batch(run.config, jax.device_count())
    heldout = load_heldout(run.config, run.tokenizer, directory / "data")
    mesh = make_mesh(run.config.mesh)
    metrics = evaluate_run(run, heldout, mesh)
    if weights is not None:
        found = evaluate_run(quantized_run(run, weights), heldout, mesh)
        metrics |= {f"{weights}_{name}": value for name, value in found.items()}
    if not is_hugging_face(directory):
        write_evaluation(directory, run.step, metrics)
    return metrics


def evaluate_run(run: Run, heldout: PackedSet, mesh: Mesh) -> dict[str, float]:
    """Held-out metrics, and those that need decoding if the config asks for them."""
    hosts = {"host": jax.process_index(), "num_hosts": jax.process_count()}
    loader = make_loader(run.config, heldout, **hosts, train=False)
    step = jax.jit(partial(eval_step, model=run.model))
    with jax.set_mesh(mesh):
        metrics = heldout_metrics(step, run.params, loader, mesh, run.config.evaluate.batches)
    return metrics | decoded_metrics(run)


def decoded_metrics(run: Run) -> dict[str, float]:
    """Exact match, if the config counts it."""
    count = run.config.evaluate.exact_match
    return {"exact_match": exact_match(run, count)} if count else {}


def write_evaluation(directory: Path, step: int, metrics: dict[str, float]) -> None:
    """The latest evaluation, machine-readable."""
    partial_file = directory / f"{FILE_NAME}.partial"
    partial_file.write_text(json.dumps({"step": step, **metrics}, indent=2) + "\n", encoding="utf-8")
    partial_file.replace(directory / FILE_NAME)


def read_evaluation(directory: Path) -> dict[str, float]:
    path = directory / FILE_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


NAMES = {
    "heldout_perplexity": ("held-out perplexity", "{:.2f}"),
    "heldout_bits_per_byte": ("bits per byte", "{:.3f}"),
    "heldout_accuracy": ("token accuracy", "{:.2%}"),
    "exact_match": ("exact match", "{:.2%}"),
}


def format_metrics(metrics: dict[str, float]) -> str:
    """A line for people; with quantized weights another, and what they lose."""
    lines = [_line(metrics, "")]
    if "int8_heldout_loss" in metrics:
        lost = metrics["int8_heldout_loss"] - metrics["heldout_loss"]
        change = metrics["int8_heldout_perplexity"] / metrics["heldout_perplexity"] - 1
        lines.append(
            f"int8 weights: {_line(metrics, 'int8_')}   loss {lost:+.5f} nats a token, perplexity {change:+.3%}"
        )
    return "\n".join(lines)


def _line(metrics: dict[str, float], prefix: str) -> str:
    shown = ((label, form, prefix + name) for name, (label, form) in NAMES.items())
    return "   ".join(f"{label} {form.format(metrics[name])}" for label, form, name in shown if name in metrics)


def samples(run: Run) -> list[tuple[str, str]]:
    """The config's prompts with what the model makes of them."""
    cfg = run.config.evaluate
    prompts = list(cfg.prompts)
    if not prompts:
        return []
    outputs = generate(
        run,
        prompts,
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        seed=run.config.seed,
    )
    return list(zip(prompts, outputs, strict=True))
