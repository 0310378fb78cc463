"""A whole run as one typed tree, and the checks that span several of its branches."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config
from jaxformer.config.data import ByteTokenizer, DataConfig, Seq2Seq
from jaxformer.config.model import ModelConfig
from jaxformer.config.optim import InverseSqrt, OptimConfig, WarmupStableDecay
from jaxformer.errors import UserError

OBJECTIVE_SHAPES = {"causal": "decoder-only", "seq2seq": "encoder-decoder"}
"""What each objective trains."""
AxisSize = Annotated[int, Field(ge=-1)]


class TrainConfig(Config):
    steps: PositiveInt = 1000
    accumulate: PositiveInt = 1
    """Split each batch into this many forward-backward passes; the result is that of the whole batch."""
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
    """Also keep this many with the lowest held-out loss; counts only steps that were evaluated."""


class EvaluateConfig(Config):
    every: PositiveInt | None = None
    """Steps between evaluations during training; none evaluates only at the end."""
    batches: PositiveInt | None = None
    """Held-out batches per evaluation; none takes the whole held-out set."""
    exact_match: NonNegativeInt = 0
    """Sequence-to-sequence only: decode this many held-out pairs and count exact answers."""
    prompts: tuple[str, ...] = ()
    """Shown with their continuation after training."""
    max_new_tokens: PositiveInt = 64
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None


class RunConfig(Config):
    workdir: str = ""
    """Where the run lives; empty means runs/<name of the config file>."""
    seed: NonNegativeInt = 0
    model: ModelConfig
    data: DataConfig | None = None
    """None for a model that was imported: training and evaluation need it, decoding does not."""
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _branches_agree(self) -> "RunConfig":
        if self.data is not None:
            _check_lengths(self)
            _check_shape(self)
        _check_steps(self)
        return self

    def check_data(self) -> None:
        """Raise if there is nothing to train or evaluate on."""
        if self.data is None:
            raise UserError(
                "data is none, as in every imported model: set data.train, such as "
                'data.train=\'{"kind":"text","paths":["my.txt"]}\', and data.heldout to evaluate'
            )


def _check_lengths(cfg: RunConfig) -> None:
    limit = cfg.model.max_length
    lengths = {"data.length": cfg.data.length}
    if isinstance(cfg.data.objective, Seq2Seq):
        lengths["data.objective.input_length"] = cfg.data.objective.input_length
    for field, length in lengths.items():
        if limit is not None and length > limit:
            raise ValueError(
                f"{field}={length} is longer than the {limit} of {_limit_name(cfg.model)}: shorten the rows or raise it"
            )
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
    wanted = OBJECTIVE_SHAPES[cfg.data.objective.kind]
    if cfg.model.shape != wanted:
        raise ValueError(
            f"data.objective.kind={cfg.data.objective.kind} trains a {wanted} model but model is {cfg.model.shape}: "
            "change the objective or the stacks"
        )
    if cfg.evaluate.exact_match and wanted != "encoder-decoder":
        raise ValueError(
            f"evaluate.exact_match={cfg.evaluate.exact_match} needs data.objective.kind=seq2seq, set it to 0"
        )
    if isinstance(cfg.data.tokenizer, ByteTokenizer) and cfg.model.vocab_size < 259:
        raise ValueError(f"model.vocab_size={cfg.model.vocab_size} is less than the 259 ids of the bytes tokenizer")


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
