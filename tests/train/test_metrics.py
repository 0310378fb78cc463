"""Metric files, speed, FLOP counts, and the error for a loss that is not finite."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxformer.config import AttentionConfig
from jaxformer.layers import num_params
from jaxformer.rundir import RunDir
from jaxformer.train.metrics import MetricWriter, mean_visible_keys, step_flops
from jaxformer.train.progress import Bar, DivergedError, Recorder


def _recorder(directory, start=0, peak=None):
    writer = MetricWriter(RunDir(directory), start)
    bar = Bar(Console(quiet=True), start, 10)
    return writer, Recorder(writer, bar, log_every=2, step_flops=1e9, peak_flops=peak)


def _metrics(loss=1.0):
    return {"loss": jnp.float32(loss), "grad_norm": jnp.float32(1.0), "tokens": jnp.float32(8.0)}


def _lines(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_logged_and_evaluated_steps_are_written_once(tmp_path):
    writer, recorder = _recorder(tmp_path, peak=1e12)
    with writer:
        for step in range(1, 6):
            recorder.add(step, _metrics(), input_wait=0.0)
        recorder.flush()
        recorder.attach({"heldout_loss": 2.0})
        recorder.close()
    lines = _lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert lines[-1]["heldout_loss"] == 2.0
    assert all({"tokens_per_second", "step_seconds", "input_wait", "mfu"} <= line.keys() for line in lines)


def test_mfu_requires_peak_flops(tmp_path):
    writer, recorder = _recorder(tmp_path)
    with writer:
        recorder.add(2, _metrics(), 0.0)
        recorder.flush()
        recorder.close()
    assert "mfu" not in _lines(tmp_path)[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_raises_with_its_step(tmp_path, value):
    writer, recorder = _recorder(tmp_path)
    with writer:
        recorder.add(1, _metrics(), 0.0)
        recorder.add(2, _metrics(value), 0.0)
        with pytest.raises(DivergedError, match=r"loss is (nan|inf) at step 2"):
            recorder.flush()


def test_metrics_after_the_last_checkpoint_are_removed_on_resume(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (2, 4, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "lo')
    with MetricWriter(RunDir(tmp_path), 4) as writer:
        writer.write(6, {"loss": 0.5})
    assert _lines(tmp_path) == [{"step": 2, "loss": 1.0}, {"step": 4, "loss": 1.0}, {"step": 6, "loss": 0.5}]


def test_flops_are_six_per_parameter_and_token_plus_attention(make_config):
    """The usual estimate (arXiv:2001.08361, section 2.1): embedding lookups do not count, the tied head does."""
    config = make_config()
    model, tokens = config.model, config.data.batch_size * config.data.length
    position_table = model.embed_dim * model.max_length
    attention = 3 * 2 * 2 * model.decoder.num_layers * tokens * (config.data.length / 2) * model.embed_dim
    estimate = 6 * (num_params(model) - position_table) * tokens + attention
    assert step_flops(config) == pytest.approx(estimate, rel=0.05)


@pytest.mark.parametrize("window", [None, 1, 5, 12, 40])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_flops_count_visible_keys(causal, window):
    """The estimate is within one key of the mean number of keys that the mask lets a query see, plus both edges."""
    length = 40
    attention = AttentionConfig(num_heads=1, head_dim=8, causal=causal, window=window)
    distance = np.arange(length)[:, None] - np.arange(length)
    reach = length if window is None else window
    visible = (distance >= 0) & (distance < reach) if causal else np.abs(distance) < reach
    mean = visible.sum(axis=1).mean()
    edges = 0 if causal or window is None else window**2 / length  # the first and the last queries see fewer keys
    assert abs(mean_visible_keys(attention, length) - mean) <= 1 + edges
