"""`jaxformer evaluate`: computes the metrics of a run, and formats metrics and samples for the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxformer.config import RunConfig, apply_overrides
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data import load_heldout
from jaxformer.decode.api import generate
from jaxformer.errors import UserError
from jaxformer.evaluate.loop import Evaluation
from jaxformer.objectives import make_objective
from jaxformer.run import Run, load, quantized_run
from jaxformer.rundir import RunDir
from jaxformer.sharding import make_mesh


def evaluate(path: str | Path, overrides: Sequence[str] = (), *, weights: str | None = None) -> dict[str, float]:
    """Compute the metrics of a run on its held-out data; a run directory also stores them in evaluation.json.

    Args:
      weights: "int8" also evaluates with quantized weights; the names of these metrics start with `int8_`.
    """
    directory = local_directory(path)
    config = apply_overrides(_read_config(directory), overrides)
    config.check_data()
    if config.data.heldout is None:
        raise UserError(
            'data.heldout is none: set it, for example data.heldout=\'{"kind":"text","paths":"heldout.txt"}\''
        )
    mesh = make_mesh(config.mesh, jax.devices())
    run = load(directory, mesh=mesh if mesh.size > 1 else None)
    # Metrics decode greedily, as during training: generation_config.json does not apply to them.
    run = replace(run, config=config, generation=None)
    if run.tokenizer is None:
        raise UserError(
            f"'{directory}' has no tokenizer, which evaluation needs to encode text: add its files to the directory"
        )
    objective, run_dir = make_objective(config, run.tokenizer), RunDir(directory)
    heldout = load_heldout(config.data, objective, run.tokenizer, run_dir.data)
    evaluation = Evaluation(config, heldout, objective, mesh)
    values = evaluation.measure(run)
    if weights is not None:
        quantized = evaluation.measure(quantized_run(run, weights))
        values |= {f"{weights}_{name}": value for name, value in quantized.items()}
    if not is_hugging_face(directory):
        run_dir.write_evaluation(run.step, values)
    return values


def _read_config(directory: Path) -> RunConfig:
    if is_hugging_face(directory):
        return RunConfig(model=HuggingFaceDirectory(directory).model)
    return RunDir(directory).read_config()


LABELS = {
    "heldout_perplexity": ("held-out perplexity", "{:.2f}"),
    "heldout_bits_per_byte": ("bits per byte", "{:.3f}"),
    "heldout_accuracy": ("token accuracy", "{:.2%}"),
    "exact_match": ("exact match", "{:.2%}"),
}
"""Label and format of each metric. A metric without an entry is shown under its own name."""
HIDDEN = ("step", "heldout_loss")


def format_metrics(values: dict[str, float]) -> str:
    """The metrics as one line; with int8 weights, a second line has their metrics and the difference."""
    plain = {name: value for name, value in values.items() if not name.startswith("int8_")}
    lines = [_format_line(plain)]
    if "int8_heldout_loss" in values:
        quantized = {name.removeprefix("int8_"): value for name, value in values.items() if name not in plain}
        lost = quantized["heldout_loss"] - values["heldout_loss"]
        change = quantized["heldout_perplexity"] / values["heldout_perplexity"] - 1
        lines.append(
            f"int8 weights: {_format_line(quantized)}   loss {lost:+.5f} nats per token, perplexity {change:+.3%}"
        )
    return "\n".join(lines)


def _format_line(values: dict[str, float]) -> str:
    labelled = [name for name in LABELS if name in values]
    others = [name for name in values if name not in LABELS and name not in HIDDEN]
    shown = [(*LABELS[name], values[name]) for name in labelled] + [(n, "{:.4g}", values[n]) for n in others]
    return "   ".join(f"{label} {form.format(value)}" for label, form, value in shown)


def generate_samples(run: Run) -> list[tuple[str, str]]:
    """The config's prompts, each with the model's output."""
    cfg = run.config.evaluate
    prompts = list(cfg.prompts)
    if not prompts:
        return []
    sampling = {"temperature": cfg.temperature, "top_p": cfg.top_p, "seed": run.config.seed}
    outputs = generate(run, prompts, max_new_tokens=cfg.max_new_tokens, **sampling)
    return list(zip(prompts, outputs, strict=True))
