"""Metric files (JSON lines and TensorBoard events), and FLOP counts for MFU (model FLOPs utilisation)."""

import json
from collections.abc import Mapping, Sequence
from types import TracebackType

import jax
from etils import epath

from jaxformer import hosts
from jaxformer.chips import chip_of
from jaxformer.config import AttentionConfig, MlpConfig, ModelConfig, MoeConfig, RecurrentConfig, RunConfig, StackConfig
from jaxformer.ops.recurrence import NUM_GATES
from jaxformer.rundir import RunDir, json_values, write_file


class MetricWriter:
    """Appends to `metrics.jsonl` and to TensorBoard events in the run directory."""

    def __init__(self, run_dir: RunDir, start_step: int) -> None:
        self._file = self._events = None
        if not hosts.is_main():
            return
        from tensorboardX import SummaryWriter

        _drop_after(run_dir.metrics, start_step)
        self._file = run_dir.metrics.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(run_dir.tensorboard), purge_step=start_step + 1)

    def write(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append one JSON object; texts, such as a BLEU signature, are not in the TensorBoard events."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **json_values(metrics)}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._events.add_scalar(name, value, step)

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()


def _drop_after(path: epath.Path, step: int) -> None:
    """Remove what a killed run logged after its last checkpoint: those steps are about to run again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except json.JSONDecodeError:  # the last line of a killed run may be incomplete
            continue
    write_file(path, "".join(line + "\n" for line in kept).encode())


def peak_flops(config: RunConfig, devices: Sequence[jax.Device]) -> float | None:
    """Peak FLOP/s of all devices together, from `train.peak_flops` or the table of chips; None if unknown."""
    chip = chip_of(devices[0].device_kind)
    peak = config.train.peak_flops or (chip and chip.bf16 / chip.cores)
    return None if peak is None else peak * len(devices)


def step_flops(config: RunConfig) -> float:
    """Model FLOPs of one training step: the backward pass costs two forward passes; remat is not counted."""
    rows, layout, model = config.data.batch_size, config.batch_layout, config.model
    target, source = layout.length, layout.source_length
    predicts_tokens = config.data.objective.head == "vocabulary"
    num_scores = layout.loss_length * model.vocab_size if predicts_tokens else 0
    if layout.num_contexts:
        num_predictions, num_negatives = layout.negatives
        num_scores = target * num_predictions * (1 + num_negatives)
    forward = 2.0 * num_scores * model.embed_dim
    if model.encoder is not None:
        forward += _stack_flops(model, model.encoder, source or target, 0)
    if isinstance(model.decoder, RecurrentConfig):
        forward += _recurrent_flops(model, model.decoder, target)
    elif model.decoder is not None:
        forward += _stack_flops(model, model.decoder, target, source)
    return 3.0 * rows * forward


def _stack_flops(model: ModelConfig, stack: StackConfig, length: int, source: int) -> float:
    """Forward FLOPs of one row: two per multiply-add, and half of the attention matrix if causal."""
    total = 0.0
    for block in map(stack.block, range(stack.num_layers)):
        keys_per_query = mean_visible_keys(block.attention, length)
        total += length * _mlp_flops(model, block.mlp)
        total += _attention_flops(model, block.attention, length, length, keys_per_query)
        if block.cross_attention is not None:
            total += _attention_flops(model, block.cross_attention, length, source, source)
    return total


def mean_visible_keys(attention: AttentionConfig, length: int) -> float:
    """Keys that a query sees on average in a row of `length` tokens."""
    window = min(attention.window or length, length)
    if attention.causal:
        return window * (1 - window / (2 * length))  # half of them without a window: the first queries see few keys
    return length if attention.window is None else min(2 * window - 1, length)


def _mlp_flops(model: ModelConfig, mlp: MlpConfig | MoeConfig) -> float:
    """Forward FLOPs of one token; of a mixture of experts, only the chosen experts and the router count."""
    dense = 2.0 * model.embed_dim * mlp.dim * (3 if mlp.gated else 2)
    return dense if mlp.kind == "mlp" else mlp.top_k * dense + 2.0 * model.embed_dim * mlp.num_experts


def _recurrent_flops(model: ModelConfig, stack: RecurrentConfig, length: int) -> float:
    """Forward FLOPs of one row: two per weight and token. Gates are not counted, like norms and softmax."""
    widths = model.embed_dim + (2 * stack.num_layers - 1) * stack.dim  # input and state widths, summed over layers
    out = stack.dim * model.embed_dim if stack.dim != model.embed_dim else 0
    return 2.0 * length * (NUM_GATES[stack.cell] * stack.dim * widths + out)


def _attention_flops(
    model: ModelConfig, attention: AttentionConfig, queries: int, keys: int, keys_per_query: float
) -> float:
    heads, kv_heads = attention.num_heads * attention.head_dim, attention.kv_heads * attention.head_dim
    projections = 2.0 * model.embed_dim * (2 * queries * heads + 2 * keys * kv_heads)
    return projections + 2.0 * 2.0 * queries * keys_per_query * heads
