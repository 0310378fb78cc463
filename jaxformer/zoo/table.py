"""The table of the zoo, from what `jaxformer zoo --measure` recorded; printing it needs neither torch nor time."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxformer.config import OBJECTIVE_CONFIGS
from jaxformer.convert.directory import FORMATS
from jaxformer.errors import UserError
from jaxformer.layers import num_params
from jaxformer.models import PRESETS, preset
from jaxformer.zoo.samples import SAMPLES

RECORD = Path(__file__).parent / "record.json"
HEADINGS = (
    "Family",
    "Shape",
    "Presets",
    "Parameters",
    "max abs delta logit",
    "KL, nats",
    "Import / export",
    "Objectives",
)


class Row(NamedTuple):
    title: str
    presets: tuple[str, ...]
    """How the names of its presets begin."""
    samples: tuple[str, ...] = ()
    """What parity was measured on; none where transformers has no such model."""


ROWS = (
    Row("Vaswani et al. 2017", ("vaswani-",)),
    Row("T5", ("t5-",), ("t5",)),
    Row("T5 v1.1, Flan-T5", ("t5v1.1-",), ("t5v1.1",)),
    Row("mT5", ("mt5-",), ("mt5",)),
    Row("BART", ("bart-",), ("bart",)),
    Row("Marian (OPUS-MT)", ("marian-",), ("marian",)),
    Row("GPT-2", ("gpt2-",), ("gpt2",)),
    Row("Llama 2, 3, 3.1, 3.2", ("llama",), ("llama",)),
    Row("Mistral", ("mistral-",), ("mistral",)),
    Row("Mixtral", ("mixtral-",), ("mixtral",)),
    Row("Gemma", ("gemma-",), ("gemma",)),
    Row("Gemma 2", ("gemma2-",), ("gemma2",)),
    Row("Gemma 3, text", ("gemma3-",), ("gemma3",)),
    Row("Qwen2.5", ("qwen2.5-",), ("qwen2.5",)),
    Row("Qwen3", ("qwen3-0", "qwen3-1", "qwen3-4b", "qwen3-8b", "qwen3-32b"), ("qwen3",)),
    Row("Qwen3 MoE", ("qwen3-30b-a3b", "qwen3-235b-a22b"), ("qwen3-moe",)),
    Row("SmolLM2", ("smollm2-",), ("smollm2",)),
    Row("BERT", ("bert-",), ("bert", "bert pooled", "bert classes")),
    Row("RoBERTa", ("roberta-",), ("roberta", "roberta classes")),
    Row("DistilBERT", ("distilbert-",), ("distilbert", "distilbert classes")),
    Row("MiniLM sentence encoders", ("minilm-",), ("minilm",)),
    Row("ModernBERT", ("modernbert-",), ("modernbert", "modernbert classes")),
    Row("Elman RNN, LSTM", ("rnn-",)),
)


def show(console: Console) -> None:
    """The table for a terminal."""
    table = Table(title="the zoo", caption=_caption(), box=SIMPLE_HEAD, padding=(0, 1))
    for heading in ("family", "presets", "max delta", "KL", "Hugging Face", "objectives"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "presets")
    for title, shape, presets, parameters, *rest in _cells():
        pairs = zip(presets.split(", "), parameters.split(", "), strict=True)
        table.add_row(f"{title}\n{shape}", "\n".join(f"{name} {count}" for name, count in pairs), *rest)
    console.print(table)


def markdown() -> str:
    """The table for the README."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(cells) + " |" for cells in _cells()]
    return "\n".join([*lines, "", _caption()])


def measure(console: Console) -> None:
    """Measure everything anew and keep it; needs torch and transformers."""
    try:
        versions = {name: metadata.version(name) for name in ("transformers", "torch", "jax")}
    except metadata.PackageNotFoundError as error:
        raise UserError(f"zoo --measure: {error.name} is not installed: pip install 'jaxformer[test]'") from None
    from jaxformer.zoo.parity import measure

    parity = {}
    for name in track(SAMPLES, "comparing with transformers", console=console):
        parity[name] = measure(SAMPLES[name])._asdict()
    counts = {name: num_params(preset(name)) for name in track(PRESETS, "counting parameters", console=console)}
    record = {"versions": versions, "parity": parity, "parameters": counts}
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read_record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def presets_of(row: Row) -> list[str]:
    return [name for name in PRESETS if name.startswith(row.presets)]


def _cells() -> list[tuple[str, ...]]:
    record = read_record()
    return [_row(row, record["parity"], record["parameters"]) for row in ROWS]


def _row(row: Row, parity: dict[str, Any], parameters: dict[str, int]) -> tuple[str, ...]:
    names = presets_of(row)
    shape = preset(names[0]).shape
    measured = [parity[name] for name in row.samples]
    divergences = [found["kl"] for found in measured if found["kl"] is not None]
    objectives = [config.model_fields["kind"].default for config in OBJECTIVE_CONFIGS if shape in config.shapes]
    return (
        row.title,
        shape,
        ", ".join(names),
        ", ".join(_count(parameters[name]) for name in names),
        f"{max(found['max_delta'] for found in measured):.0e}" if measured else "-",
        f"{max(divergences):.0e}" if divergences else "-",
        _exchange(row) if measured else "-",
        ", ".join(objectives) or "-",
    )


def _exchange(row: Row) -> str:
    """The names in config.json of what is read and written."""
    return ", ".join(dict.fromkeys(FORMATS[SAMPLES[name].model_type].model_type for name in row.samples))


def _count(parameters: int) -> str:
    unit, name = (1e9, "B") if parameters >= 0.9995e9 else (1e6, "M")  # 999.9M would round to 1e+03M
    return f"{parameters / unit:.3g}{name}"


def _caption() -> str:
    versions = read_record()["versions"]
    return (
        "Largest difference of a logit (of a hidden state, for encoders without a head) and mean divergence of the "
        "next-token distributions, in float32, between a tiny random model of transformers "
        f"{versions['transformers']} (torch {versions['torch']}) and the same weights here."
    )
