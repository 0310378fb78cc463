"""A whole run as one typed tree, and the checks that span several of its branches."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config
from jaxformer.config.data import ByteTokenizer, DataConfig
from jaxformer.config.metrics import Metric, Perplexity
from jaxformer.config.migrate import metrics_from_exact_match
from jaxformer.config.model import ModelConfig
from jaxformer.config.optim import InverseSqrt, OptimConfig, WarmupStableDecay
from jaxformer.errors import UserError

AxisSize = Annotated[int, Field(ge=-1)]


class StartConfig(Config):
    """Weights to start training from; a plain path is the same as `{path: ...}`."""

    path: str
    """A run directory, a Hugging Face directory, or hf://org/name."""
    step: NonNegativeInt | None = None
    """Which checkpoint of a run directory; none means the latest."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class ParameterSelector(Config):
    """Parameters by path and depth; a plain glob is the same as `{path: ...}`."""

    path: str
    """A glob on parameter paths, such as `embedding/*` or `*/attention/*`; `*` also matches `/`."""
    layers: tuple[int, int] | None = None
    """Only these layers of a stack, half-open as a Python slice: (0, -1) is all but the last."""

    @model_validator(mode="before")
    @classmethod
    def _from_glob(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class TrainConfig(Config):
    steps: PositiveInt = 1000
    accumulate: PositiveInt = 1
    """Split each batch into this many forward-backward passes; the result is that of the whole batch."""
    start: StartConfig | None = None
    """Start from these weights instead of random ones; `model` may then be omitted and comes from there."""
    freeze: tuple[ParameterSelector, ...] = ()
    """Parameters that are not trained; they have no gradients and no optimizer state."""
    log_every: PositiveInt = 10
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2, which keeps the softmax normaliser near 1."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    loss_chunks: PositiveInt | Literal["auto"] = "auto"
    """Parts of the sequence whose logits exist at a time; the result does not depend on it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations; auto is bfloat16 on TPU and GPU, float32 on CPU. Parameters are always float32."""
    remat: Literal["none", "full", "dots"] = "dots"
    """What the backward pass computes again: nothing, whole blocks, or all but matrix products and attention."""
    unroll: PositiveInt | Literal["all"] = 1
    """Layers per iteration of the scan over layers; never affects parameters."""
    attention: Literal["auto", "reference", "blocked"] = "auto"
    peak_flops: PositiveFloat | None = None
    """Peak of one device in FLOP/s, for MFU; none looks the device up and reports no MFU if it is unknown."""


class MeshConfig(Config):
    """Devices along each axis; -1, on one axis at most, takes all that remain."""

    data: AxisSize = -1
    fsdp: AxisSize = 1
    tensor: AxisSize = 1
    context: AxisSize = 1
    expert: AxisSize = 1
    stage: AxisSize = 1

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        sizes = dict(self)
        if 0 in sizes.values():
            raise ValueError(f"{next(a for a, n in sizes.items() if n == 0)}=0: an unused axis has size 1")
        if list(sizes.values()).count(-1) > 1:
            open_axes = ", ".join(a for a, n in sizes.items() if n == -1)
            raise ValueError(f"{open_axes} are all -1: only one axis can take the remaining devices")
        for axis in ("context", "expert", "stage"):
            if sizes[axis] != 1:
                raise ValueError(f"{axis}={sizes[axis]}: not yet supported, set 1 and use data, fsdp or tensor")
        return self


class CheckpointConfig(Config):
    every: PositiveInt = 500
    """Steps between checkpoints; the last step always has one."""
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    """Also keep this many with the best value of `best`; counts only steps at which it was measured."""
    best: str = "heldout_loss"
    """The metric value that selects the best checkpoints."""


class EvaluateConfig(Config):
    every: PositiveInt | None = None
    """Steps between evaluations during training; none evaluates only at the end."""
    batches: PositiveInt | None = None
    """Held-out batches per evaluation; none takes the whole held-out set."""
    metrics: tuple[Metric, ...] = (Perplexity(),)
    """What is measured, each as often as its own `every` says."""
    prompts: tuple[str, ...] = ()
    """Shown with their continuation after training."""
    max_new_tokens: PositiveInt = 64
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, value: Any) -> Any:
        return metrics_from_exact_match(value) if isinstance(value, dict) else value


class RunConfig(Config):
    workdir: str = ""
    """Where the run lives; empty means runs/<name of the config file>."""
    seed: NonNegativeInt = 0
    model: ModelConfig | None = None
    """None only until training with `train.start` has read the model from there."""
    data: DataConfig | None = None
    """None for a model that was imported: training and evaluation need it, decoding does not."""
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _branches_agree(self) -> "RunConfig":
        if self.model is None and self.train.start is None:
            raise ValueError("model is missing: set it, or set train.start to take it from another run")
        if self.data is not None:
            _check_batch(self)
            if self.model is not None:
                _check_lengths(self)
                _check_shape(self)
        _check_steps(self)
        _check_best(self)
        return self

    def check_data(self) -> None:
        """Raise if there is nothing to train or evaluate on."""
        if self.data is None:
            raise UserError(
                "data is none, as in every imported model: set data.train, such as "
                'data.train=\'{"kind":"text","paths":["my.txt"]}\', and data.heldout to evaluate'
            )


def _check_lengths(cfg: RunConfig) -> None:
    limit, layout = cfg.model.max_length, cfg.data.batch_layout
    lengths = {"data.length": layout.length, "data.objective.input_length": layout.source_length}
    for field, length in lengths.items():
        if limit is not None and length > limit:
            raise ValueError(
                f"{field}={length} is longer than the {limit} of {_limit_name(cfg.model)}: shorten the rows or raise it"
            )


def _check_batch(cfg: RunConfig) -> None:
    if cfg.train.loss_chunks != "auto" and cfg.data.length % cfg.train.loss_chunks:
        raise ValueError(
            f"data.length={cfg.data.length} is not a multiple of train.loss_chunks={cfg.train.loss_chunks}"
        )
    if cfg.data.batch_size % cfg.train.accumulate:
        raise ValueError(
            f"data.batch_size={cfg.data.batch_size} is not a multiple of train.accumulate={cfg.train.accumulate}"
        )


def _limit_name(model: ModelConfig) -> str:
    own = model.context_length == model.max_length
    return "model.context_length" if own else "model.embedding.position.max_length"


def _check_shape(cfg: RunConfig) -> None:
    objective = cfg.data.objective
    if cfg.model.shape not in objective.shapes:
        raise ValueError(
            f"data.objective.kind={objective.kind} trains a {' or '.join(objective.shapes)} model but model is "
            f"{cfg.model.shape}: change the objective or the stacks"
        )
    for i, metric in enumerate(cfg.evaluate.metrics):
        if cfg.model.shape not in metric.shapes:
            raise ValueError(
                f"evaluate.metrics.{i}.kind={metric.kind} measures a {' or '.join(metric.shapes)} model but model is "
                f"{cfg.model.shape}: remove that metric"
            )
    if isinstance(cfg.data.tokenizer, ByteTokenizer) and cfg.model.vocab_size < 259:
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size} is less than the 259 ids of the bytes tokenizer")


def _check_best(cfg: RunConfig) -> None:
    measured = [name for metric in cfg.evaluate.metrics for name in metric.values]
    if cfg.checkpoint.keep_best and cfg.checkpoint.best not in measured:
        raise ValueError(
            f"checkpoint.best={cfg.checkpoint.best!r} is not measured by evaluate.metrics, which give: "
            f"{', '.join(measured) or 'nothing'}: name one of them or set checkpoint.keep_best=0"
        )


def _check_steps(cfg: RunConfig) -> None:
    schedule, steps = cfg.optim.schedule, cfg.train.steps
    if schedule.warmup_steps > steps and not isinstance(schedule, InverseSqrt):
        raise ValueError(
            f"optim.schedule.warmup_steps={schedule.warmup_steps} is more than train.steps={steps}: shorten the warm-up"
        )
    if isinstance(schedule, WarmupStableDecay) and schedule.warmup_steps + schedule.decay_steps > steps:
        raise ValueError(
            f"optim.schedule: warmup_steps={schedule.warmup_steps} + decay_steps={schedule.decay_steps} "
            f"is more than train.steps={steps}: shorten one of them"
        )
