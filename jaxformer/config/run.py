"""The config of a whole run, and the checks that involve more than one of its parts."""

import contextlib
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from jaxformer.config.base import Config
from jaxformer.config.data import ByteTokenizer, DataConfig
from jaxformer.config.metrics import Metric, MetricConfig, Values, default_metrics
from jaxformer.config.migrate import metrics_from_exact_match
from jaxformer.config.model import ModelConfig
from jaxformer.config.objectives import OBJECTIVE_CONFIGS
from jaxformer.config.optim import InverseSqrt, OptimConfig, WarmupStableDecay
from jaxformer.errors import UserError
from jaxformer.topology import parse_topology
from jaxformer.typing import BatchLayout

AxisSize = Annotated[int, Field(ge=-1)]
Remat = Literal["none", "full", "attention", "dots", "offload"]
MESH_AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")


class StartConfig(Config):
    """Weights to start training from; a plain string is short for `{path: ...}`."""

    path: str
    """A run directory, a Hugging Face directory, or `hf://org/name`."""
    step: NonNegativeInt | None = None
    """Step of the checkpoint in a run directory. None: the latest."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class ParameterSelector(Config):
    """Selects parameters by path and layer; a plain string is short for `{path: ...}`."""

    path: str
    """Glob pattern of parameter paths, such as `embedding/*` or `*/attention/*`; `*` also matches `/`."""
    layers: tuple[int, int] | None = None
    """Range [start, stop) of layers in a stack, as in a Python slice: [0, -1] is all but the last. None: all layers."""

    @model_validator(mode="before")
    @classmethod
    def _from_glob(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class EarlyStoppingConfig(Config):
    """Stops training when the value of `checkpoint.best` no longer improves; `train.steps` remains the maximum."""

    patience: PositiveInt
    """Number of evaluations in a row without improvement after which training stops."""
    min_delta: NonNegativeFloat = 0.0
    """Smallest change that counts as an improvement."""


class TrainConfig(Config):
    """The training loop and how its step is computed."""

    steps: PositiveInt = 1000
    """Number of optimizer steps of the whole run."""
    accumulate: PositiveInt = 1
    """Gradient accumulation: number of micro-batches per step; the result is that of the whole batch."""
    start: StartConfig | None = None
    """Weights to start from; `model` may then be omitted and is read from there. None: random initialisation."""
    word_vectors: str | None = None
    """Word vectors that the embeddings of the same words start from: a run of `word2vec`, or a file in its text format.
    None: embeddings start like the other weights."""
    freeze: tuple[ParameterSelector, ...] = ()
    """Parameters that are not trained; they have no gradients and no optimizer state."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when the value of `checkpoint.best` no longer improves. None: train all `steps`."""
    log_every: PositiveInt = 10
    """Steps between logged metrics."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the z-loss log(Z)^2, which keeps the softmax normaliser Z near 1. 0: no z-loss."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability that is spread evenly over the vocabulary in the targets. 0: no smoothing."""
    loss_chunks: PositiveInt | Literal["auto"] = "auto"
    """Number of chunks of the sequence, or with `mesh.fsdp` of the vocabulary, whose logits are computed in turn, to
    save memory. auto: chosen by size."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """dtype of activations; parameters are always float32. auto: bfloat16 on TPU and GPU, float32 on CPU."""
    remat: Remat = "dots"
    """What the backward pass recomputes. none: nothing; full: whole blocks; attention: blocks, except the attention
    kernels; dots: all but matmuls and attention; offload: as attention, and what is saved is kept in host memory."""
    unroll: PositiveInt | Literal["all"] = 1
    """Layer patterns per iteration of the scan over layers, or `all`: no scan; parameters do not depend on it."""
    attention: Literal["auto", "reference", "blocked", "scanned", "splash", "cudnn"] = "auto"
    """Attention kernel. reference: all logits at once; blocked, scanned: one block of queries at a time, unrolled or in
    a loop; splash, cudnn: the fused kernels of TPUs and NVIDIA GPUs; auto: the best one for the device."""
    peak_flops: PositiveFloat | None = None
    """Peak FLOP/s of one device, to report MFU. None: looked up by device type; no MFU if the type is unknown."""


class MeshConfig(Config):
    """Number of devices along each mesh axis; one axis may be -1, which uses all remaining devices."""

    data: AxisSize = -1
    """Devices for data parallelism: each has different rows and all parameters. -1: all remaining devices."""
    fsdp: AxisSize = 1
    """Devices for fully sharded data parallelism: each has different rows and a shard of the parameters."""
    tensor: AxisSize = 1
    """Devices for tensor parallelism: heads, MLP channels and the vocabulary are split over them."""
    context: AxisSize = 1
    """Devices for context parallelism, which splits the sequence; not yet supported, must be 1."""
    expert: AxisSize = 1
    """Devices for expert parallelism; not yet supported, must be 1."""
    stage: AxisSize = 1
    """Devices for pipeline parallelism; not yet supported, must be 1."""
    topology: str | None = None
    """Hardware that the run is made for, such as `v5e-256` or `h100-64`: preflight compiles for it, and training on
    other hardware is refused. None: any."""

    @field_validator("topology")
    @classmethod
    def _known_topology(cls, name: str | None) -> str | None:
        return None if name is None else parse_topology(name).name

    @model_validator(mode="after")
    def _sizes(self) -> "MeshConfig":
        sizes = {axis: getattr(self, axis) for axis in MESH_AXES}
        if 0 in sizes.values():
            raise ValueError(f"{next(a for a, n in sizes.items() if n == 0)}=0: an unused axis has size 1, set 1")
        if list(sizes.values()).count(-1) > 1:
            open_axes = ", ".join(a for a, n in sizes.items() if n == -1)
            raise ValueError(f"{open_axes} are all -1: only one axis can take the remaining devices")
        for axis in ("context", "expert", "stage"):
            if sizes[axis] != 1:
                raise ValueError(f"{axis}={sizes[axis]}: not yet supported, set 1 and use data, fsdp or tensor")
        return self


class CheckpointConfig(Config):
    """When checkpoints are saved and which are kept."""

    every: PositiveInt = 500
    """Steps between checkpoints; the last step is always saved, and the best one so far with `train.early_stopping`."""
    keep_last: PositiveInt = 2
    """Number of latest checkpoints to keep."""
    keep_best: NonNegativeInt = 1
    """Number of checkpoints to keep for the best values of `best`, in addition to the latest. 0: only the latest."""
    best: str = "heldout_loss"
    """Metric value that ranks checkpoints; those of steps without an evaluation are never the best."""


class EvaluateConfig(Config):
    """Evaluation on the held-out data, and text generated after training."""

    every: PositiveInt | None = None
    """Steps between evaluations during training. None: only after the last step."""
    batches: PositiveInt | None = None
    """Held-out batches per evaluation. None: the whole held-out set."""
    metrics: tuple[Metric, ...] | None = None
    """Metrics to compute; each may set its own `every`. None: one that suits the objective and has `heldout_loss`."""
    prompts: tuple[str, ...] = ()
    """Prompts whose generated outputs are printed after training."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of tokens to generate for each of `prompts`."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Sampling temperature for `prompts`. 0: greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Nucleus sampling for `prompts`: total probability of the most likely tokens to sample from. None: all tokens."""

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, value: Any) -> Any:
        return metrics_from_exact_match(value) if isinstance(value, dict) else value


class RunConfig(Config):
    """Everything that defines a run."""

    workdir: str = ""
    """Run directory. Empty: `runs/<name of the config file>`."""
    seed: NonNegativeInt = 0
    """Seed of the initial parameters, the order of the data, dropout and sampled outputs."""
    model: ModelConfig | None = None
    """Model architecture. None: read from `train.start`."""
    data: DataConfig | None = None
    """Data, needed for training and evaluation. None, as in imported models: only decoding is possible."""
    optim: OptimConfig = OptimConfig()
    """Optimizer, learning-rate schedule and regularisation."""
    train: TrainConfig = TrainConfig()
    """The training loop and how its step is computed."""
    mesh: MeshConfig = MeshConfig()
    """Device mesh: number of devices for each kind of parallelism."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are saved and which are kept."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Evaluation on the held-out data, and text generated after training."""

    @model_validator(mode="after")
    def _parts_agree(self) -> "RunConfig":
        if self.model is None and self.train.start is None:
            raise ValueError("model is missing: set it, or set train.start to read it from another run")
        if self.train.start is not None and self.train.word_vectors is not None:
            raise ValueError(
                f"train.word_vectors={self.train.word_vectors} and train.start={self.train.start.path} both set the "
                "embeddings: set one of them to none"
            )
        if self.data is not None:
            _check_batch(self)
            if self.model is not None:
                _check_shape(self)
                _check_lengths(self)
                _check_chunks(self)
                _check_softmax(self)
                _check_tokenizers(self)
            _check_metrics(self)
        _check_steps(self)
        _check_best(self)
        if self.model is not None:
            _check_prompts(self)
        _check_early_stopping(self)
        return self

    @property
    def metrics(self) -> tuple[MetricConfig, ...]:
        """The metrics of `evaluate.metrics`, or those that suit the objective."""
        objective = None if self.data is None else self.data.objective
        return default_metrics(objective) if self.evaluate.metrics is None else self.evaluate.metrics

    @property
    def reported(self) -> Values:
        """The values that the metrics report, with the direction of improvement."""
        objective = None if self.data is None else self.data.objective
        return {name: value for each in self.metrics for name, value in each.reported(objective, self.model).items()}

    @property
    def batch_layout(self) -> BatchLayout:
        """Sizes of a training batch."""
        return self.data.objective.batch_layout(self.data.length, self.model)

    def check_data(self) -> None:
        """Raise if the config has no data."""
        if self.data is None:
            # Without a model, it is read from train.start later.
            kinds = "" if self.model is None else ", ".join(_objectives(self.model))
            raise UserError(
                "data is none, as in imported models: set data.train, such as "
                'data.train=\'{"kind":"text","paths":["my.txt"]}\', and data.heldout to evaluate'
                + (f"; the values of data.objective.kind for this model are {kinds}" if kinds else "")
            )


def _objectives(model: ModelConfig) -> list[str]:
    """Names of the objectives that train this model with the heads that it has."""
    kinds = []
    for objective in OBJECTIVE_CONFIGS:
        # model_construct, because some objectives require lengths, which do not matter here.
        with contextlib.suppress(ValueError):
            objective.model_construct().check_model(model)
            kinds.append(objective.model_fields["kind"].default)
    return kinds


def _check_lengths(cfg: RunConfig) -> None:
    limit, layout = cfg.model.max_length, cfg.batch_layout
    lengths = {"data.length": layout.length, "data.objective.input_length": layout.source_length}
    for field, length in lengths.items():
        if limit is not None and length > limit:
            raise ValueError(
                f"{field}={length} is longer than {_limit_name(cfg.model)}={limit}: shorten the rows or raise the limit"
            )


def _check_batch(cfg: RunConfig) -> None:
    if cfg.data.batch_size % cfg.train.accumulate:
        raise ValueError(
            f"data.batch_size={cfg.data.batch_size} is not a multiple of train.accumulate={cfg.train.accumulate}: "
            "change one of them"
        )


def _check_chunks(cfg: RunConfig) -> None:
    chunks, length = cfg.train.loss_chunks, cfg.batch_layout.loss_length
    if chunks != "auto" and length % chunks:
        name = "data.length" if length == cfg.data.length else "the number of predicted tokens per row"
        raise ValueError(f"{name}={length} is not a multiple of train.loss_chunks={chunks}: change one of them")


def _check_softmax(cfg: RunConfig) -> None:
    objective = cfg.data.objective
    for name in ("label_smoothing", "z_loss"):
        value = getattr(cfg.train, name)
        if value and not objective.has_softmax(cfg.model):
            problem = "" if cfg.model.pooler is None else f" with model.pooler.problem={cfg.model.pooler.problem}"
            raise ValueError(
                f"train.{name}={value} changes a softmax, which data.objective.kind={objective.kind}{problem} has not: "
                "set 0"
            )


def _limit_name(model: ModelConfig) -> str:
    limits_context = model.context_length == model.max_length
    return "model.context_length" if limits_context else "model.embedding.position.max_length"


def _check_shape(cfg: RunConfig) -> None:
    cfg.data.objective.check_model(cfg.model)


def _check_metrics(cfg: RunConfig) -> None:
    kind, model = cfg.data.objective.kind, cfg.model
    for i, metric in enumerate(cfg.metrics):
        name = f"evaluate.metrics.{i}.kind={metric.kind}"
        if model is not None and model.shape not in metric.shapes:
            raise ValueError(
                f"{name} needs a model that is {' or '.join(metric.shapes)}, but model is {model.shape}: "
                "remove that metric"
            )
        if kind not in metric.objectives:
            raise ValueError(
                f"{name} works with data.objective.kind {' or '.join(metric.objectives)}, but it is {kind}: "
                "remove that metric"
            )


def _check_tokenizers(cfg: RunConfig) -> None:
    data, model = cfg.data, cfg.model
    if data.source_tokenizer is not None and model.source_vocab_size is None:
        raise ValueError(
            "data.source_tokenizer is set but model.source_vocab_size is none, so that source and target share one "
            "embedding table: set model.source_vocab_size, or set data.source_tokenizer=none"
        )
    sizes = {"model.vocab_size": (data.tokenizer, model.vocab_size)}
    if model.source_vocab_size is not None:
        sizes["model.source_vocab_size"] = (data.source_tokenizer or data.tokenizer, model.source_vocab_size)
    for name, (tokenizer, size) in sizes.items():
        if isinstance(tokenizer, ByteTokenizer):
            needed = 259 + len({*tokenizer.extra_tokens, *data.objective.tokens})
            if size < needed:
                raise ValueError(
                    f"{name}={size} is less than the {needed} ids of the bytes tokenizer: set {needed} or more"
                )


def _check_prompts(cfg: RunConfig) -> None:
    if cfg.evaluate.prompts and (cfg.model.decoder is None or cfg.model.head is None):
        raise ValueError(
            f"evaluate.prompts={list(cfg.evaluate.prompts)}: a model that is {cfg.model.shape} or has no head over the "
            "vocabulary generates no text: set []"
        )


def _check_best(cfg: RunConfig) -> None:
    best, reported = cfg.checkpoint.best, cfg.reported
    if (cfg.checkpoint.keep_best or cfg.train.early_stopping) and best not in reported:
        raise ValueError(
            f"checkpoint.best={best!r} is not a value of evaluate.metrics, which report: "
            f"{', '.join(reported) or 'nothing'}: name one of them"
            + ("" if cfg.train.early_stopping else " or set checkpoint.keep_best=0")
        )


def _check_early_stopping(cfg: RunConfig) -> None:
    if cfg.train.early_stopping is None:
        return
    if cfg.data is not None and cfg.data.heldout is None:
        raise ValueError("train.early_stopping needs held-out data, but data.heldout is none: set data.heldout")
    best = cfg.checkpoint.best
    intervals = [cfg.evaluate.every if m.every is None else m.every for m in cfg.metrics if best in m.values]
    if not any(isinstance(every, int) for every in intervals):
        raise ValueError(
            f"train.early_stopping follows {best}, which is evaluated only after the last step: set evaluate.every, or "
            "every of that metric"
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
