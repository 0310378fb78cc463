"""`jaxformer evaluate`: computes the metrics of a run, and formats metrics and samples for the terminal."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from jaxformer.config import ModelConfig, RunConfig, apply_overrides
from jaxformer.convert.directory import HuggingFaceDirectory, is_hugging_face
from jaxformer.convert.hub import local_directory
from jaxformer.data import load_heldout
from jaxformer.decode.api import generate
from jaxformer.errors import UserError
from jaxformer.evaluate.loop import Evaluation, MetricValues
from jaxformer.objectives import make_objective
from jaxformer.run import Run, load, quantized_run
from jaxformer.rundir import RunDir
from jaxformer.sharding import make_mesh


def evaluate(path: str | Path, overrides: Sequence[str] = (), *, weights: str | None = None) -> MetricValues:
    """Compute the metrics of a run on its held-out data; a run directory also stores them in evaluation.json.

    Args:
      weights: "int8" also evaluates with quantized weights; the names of these metrics start with `int8_`.
    """
    directory = local_directory(path)
    saved = _read_config(directory)
    config = apply_overrides(saved, overrides)
    config.check_data()
    _check_same_model(saved, config)
    if not config.metrics:
        raise UserError("evaluate.metrics=[]: there is nothing to evaluate, name a metric")
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
    """The config of the directory, so that every choice of metrics is valid: no value ranks checkpoints or stops."""
    if is_hugging_face(directory):
        config = RunConfig(model=HuggingFaceDirectory(directory).model)
    else:
        config = RunDir(directory).read_config()
    return config.replace(
        checkpoint=config.checkpoint.replace(keep_best=0), train=config.train.replace(early_stopping=None)
    )


def _check_same_model(saved: RunConfig, config: RunConfig) -> None:
    """Raise if overrides change the model, whose weights are those of the directory; classes may get other names."""
    if _without_labels(saved.model) != _without_labels(config.model):
        raise UserError("model: overrides cannot change a trained model, except for model.pooler.labels: remove them")


def _without_labels(model: ModelConfig) -> ModelConfig:
    return model if model.pooler is None else model.replace(pooler=model.pooler.replace(labels=()))


LABELS = {
    "heldout_perplexity": ("held-out perplexity", "{:.2f}"),
    "heldout_bits_per_byte": ("bits per byte", "{:.3f}"),
    "heldout_accuracy": ("token accuracy", "{:.2%}"),
    "masked_accuracy": ("masked accuracy", "{:.2%}"),
    "pseudo_perplexity": ("pseudo-perplexity", "{:.2f}"),
    "exact_match": ("exact match", "{:.2%}"),
    "bleu": ("BLEU", "{:.2f}"),
    "chrf": ("chrF", "{:.2f}"),
    "class_accuracy": ("accuracy", "{:.2%}"),
    "f1": ("F1", "{:.2%}"),
    "micro_f1": ("micro F1", "{:.2%}"),
    "macro_f1": ("macro F1", "{:.2%}"),
    "matthews": ("Matthews correlation", "{:.4f}"),
    "pearson": ("Pearson correlation", "{:.4f}"),
    "spearman": ("Spearman correlation", "{:.4f}"),
    "tag_accuracy": ("tag accuracy", "{:.2%}"),
    "tag_precision": ("entity precision", "{:.2%}"),
    "tag_recall": ("recall", "{:.2%}"),
    "tag_f1": ("F1", "{:.2%}"),
}
"""Label and format of each metric. A metric without an entry is shown under its own name."""
HIDDEN = ("step", "heldout_loss")


def format_metrics(values: MetricValues) -> str:
    """The metrics as one line; with int8 weights, a second line has their metrics and the difference."""
    plain = {name: value for name, value in values.items() if not name.startswith("int8_")}
    lines = [_format_line(plain)]
    quantized = {name.removeprefix("int8_"): value for name, value in values.items() if name not in plain}
    if quantized:
        line = f"int8 weights: {_format_line(quantized)}"
        if "heldout_loss" in quantized:
            line += f"   loss {quantized['heldout_loss'] - values['heldout_loss']:+.5f}"
        if "heldout_perplexity" in quantized:
            change = quantized["heldout_perplexity"] / values["heldout_perplexity"] - 1
            line += f" nats per token, perplexity {change:+.3%}"
        lines.append(line)
    return "\n".join(lines)


def format_evaluation(values: MetricValues) -> str:
    """The metrics, and one line for each text that says how a number was computed, such as a BLEU signature."""
    texts = [f"{name.replace('_', ' ')} {value}" for name, value in values.items() if isinstance(value, str)]
    # Quantized weights do not change how a number is computed.
    return "\n".join([format_metrics(values), *(line for line in texts if not line.startswith("int8 "))])


def _format_line(values: MetricValues) -> str:
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    labelled = [name for name in LABELS if name in numbers]
    others = [name for name in numbers if name not in LABELS and name not in HIDDEN]
    shown = [(*LABELS[name], numbers[name]) for name in labelled] + [(n, "{:.4g}", numbers[n]) for n in others]
    if not shown and "heldout_loss" in numbers:
        shown = [("held-out loss", "{:.4f}", numbers["heldout_loss"])]
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
