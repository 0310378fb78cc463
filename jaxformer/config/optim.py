"""Optimizer and learning-rate schedule configs; `train/optim.py` builds the optax transformations from them."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# ---------------------------------------------------------------- algorithms
class AdamW(Config):
    """AdamW (arXiv:1711.05101); equal to Adam if `optim.weight_decay` is 0."""

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    """Decay rate of the first moment, the moving average of gradients."""
    b2: Beta = 0.95
    """Decay rate of the second moment, the moving average of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment, for numerical stability."""


class Adafactor(Config):
    """Adafactor (arXiv:1804.04235): factored second moments and update clipping, with our learning-rate schedule."""

    kind: Literal["adafactor"] = "adafactor"
    decay_rate: Beta = 0.8
    """Exponent c of the second moment's decay rate, 1 - step ** -c."""
    clip_threshold: PositiveFloat = 1.0
    """Maximum root mean square of the update of a parameter, before the learning rate is applied."""
    min_dim_to_factor: PositiveInt = 128
    """Factor the second moment of parameters with at least two dimensions of this size or larger."""


class Lion(Config):
    """Lion (arXiv:2302.06675): the update is the sign of a moving average of gradients."""

    kind: Literal["lion"] = "lion"
    b1: Beta = 0.9
    """Weight of the momentum, against the current gradient, in the update."""
    b2: Beta = 0.99
    """Decay rate of the momentum."""


class Sgd(Config):
    """Stochastic gradient descent, optionally with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Beta = 0.0
    """Decay rate of the momentum. 0: no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum; needs `momentum` greater than 0."""


class Muon(Config):
    """Muon: orthogonalised momentum for the matrices of the blocks, Nesterov AdamW for all other parameters.

    Embeddings and the head use AdamW because they are not maps between features
    (kellerjordan.github.io/posts/muon)."""

    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    """Decay rate of the momentum of the block matrices."""
    ns_steps: PositiveInt = 5
    """Newton-Schulz iterations per orthogonalisation."""
    b1: Beta = 0.9
    """First-moment decay rate of AdamW for all other parameters."""
    b2: Beta = 0.95
    """Second-moment decay rate of AdamW for all other parameters."""


Algorithm = Annotated[AdamW | Adafactor | Lion | Sgd | Muon, Field(discriminator="kind")]


# ---------------------------------------------------------------- schedules
class Schedule(Config):
    """Base class of schedules: a linear warm-up to the peak, `optim.learning_rate`, and what follows it."""

    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate grows linearly from 0 to its peak."""


class Constant(Schedule):
    """Constant at the peak learning rate."""

    kind: Literal["constant"] = "constant"


class Linear(Schedule):
    """Linear decay from the peak learning rate to a fraction of it at `train.steps`."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""


class Cosine(Schedule):
    """Cosine decay from the peak learning rate to a fraction of it at `train.steps`."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""


class InverseSqrt(Schedule):
    """Inverse square-root decay: peak * sqrt(warmup_steps / step) (arXiv:1706.03762, equation 3)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: PositiveInt = 4000
    """Steps over which the learning rate grows linearly from 0 to its peak; they also set the speed of the decay."""


class WarmupStableDecay(Schedule):
    """Constant at the peak learning rate, then linear decay over the last steps (arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_steps: NonNegativeInt
    """Steps of the final decay, which ends at `train.steps`."""
    final: Fraction = 0.0
    """Final learning rate as a fraction of the peak."""


AnySchedule = Annotated[
    Constant | Linear | Cosine | InverseSqrt | WarmupStableDecay,
    Field(discriminator="kind"),
]


class OptimConfig(Config):
    """Optimizer, learning-rate schedule and regularisation."""

    algorithm: Algorithm = AdamW()
    """Optimizer algorithm."""
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate of the schedule."""
    schedule: AnySchedule = Cosine()
    """Learning-rate schedule over the steps of the run."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay, multiplied by the learning rate; not applied to norms and biases. 0: no decay."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global norm of the gradient; larger gradients are scaled down to it. None: no clipping."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of stored moments: the first and the second of AdamW (also where Muon uses it), the momentum of Lion, SGD
    and Muon. bfloat16 halves their memory: they are rounded stochastically, and updates are computed in float32."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Decay rate of a moving average of the parameters, which evaluation and decoding then use. None: no average."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "OptimConfig":
        if isinstance(self.algorithm, Sgd) and self.algorithm.nesterov and not self.algorithm.momentum:
            raise ValueError("algorithm.nesterov=true with algorithm.momentum=0: set a momentum, such as 0.9")
        return self

    @model_validator(mode="after")
    def _has_moments(self) -> "OptimConfig":
        name = self.algorithm.kind
        has_none = isinstance(self.algorithm, Adafactor) or (
            isinstance(self.algorithm, Sgd) and not self.algorithm.momentum
        )
        if self.moment_dtype != "float32" and has_none:
            reason = "factored second moments, which are small" if name == "adafactor" else "no momentum"
            raise ValueError(
                f"moment_dtype={self.moment_dtype} with algorithm.kind={name}, which has {reason}: "
                "set moment_dtype=float32, or use adamw, lion or muon"
            )
        return self
