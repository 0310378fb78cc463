"""Optimizers and learning-rate schedules as data; `train/optim.py` turns them into optax."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from jaxformer.config.base import Config

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


# ---------------------------------------------------------------- algorithms
class AdamW(Config):
    """arXiv:1711.05101; with weight_decay 0 it is Adam."""

    kind: Literal["adamw"] = "adamw"
    b1: Beta = 0.9
    b2: Beta = 0.95
    eps: PositiveFloat = 1e-8


class Adafactor(Config):
    """arXiv:1804.04235, with the factored second moment and update clipping; the learning rate is ours."""

    kind: Literal["adafactor"] = "adafactor"
    decay_rate: Beta = 0.8
    clip_threshold: PositiveFloat = 1.0
    min_dim_to_factor: PositiveInt = 128


class Lion(Config):
    """arXiv:2302.06675."""

    kind: Literal["lion"] = "lion"
    b1: Beta = 0.9
    b2: Beta = 0.99


class Sgd(Config):
    kind: Literal["sgd"] = "sgd"
    momentum: Beta = 0.0
    nesterov: bool = False


class Muon(Config):
    """Orthogonalised momentum for the matrices of the blocks, Nesterov AdamW for everything else.

    Embeddings and the head are not maps between features (kellerjordan.github.io/posts/muon)."""

    kind: Literal["muon"] = "muon"
    momentum: Beta = 0.95
    ns_steps: PositiveInt = 5
    b1: Beta = 0.9
    b2: Beta = 0.95


Algorithm = Annotated[AdamW | Adafactor | Lion | Sgd | Muon, Field(discriminator="kind")]


# ---------------------------------------------------------------- schedules
class Schedule(Config):
    warmup_steps: NonNegativeInt = 0
    """The rate grows linearly from 0 to its peak over these steps."""


class Constant(Schedule):
    kind: Literal["constant"] = "constant"


class Linear(Schedule):
    """Straight down from the peak to `final` of it at `train.steps`."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0


class Cosine(Schedule):
    """Half a cosine from the peak to `final` of it at `train.steps`."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1


class InverseSqrt(Schedule):
    """peak * sqrt(warmup_steps / step) after the warm-up (arXiv:1706.03762, equation 3)."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup_steps: PositiveInt = 4000


class WarmupStableDecay(Schedule):
    """The peak is held, then falls linearly to `final` of it over the last `decay_steps` (arXiv:2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay_steps: NonNegativeInt
    final: Fraction = 0.0


AnySchedule = Annotated[
    Constant | Linear | Cosine | InverseSqrt | WarmupStableDecay,
    Field(discriminator="kind"),
]


class OptimConfig(Config):
    algorithm: Algorithm = AdamW()
    learning_rate: PositiveFloat = 1e-3
    """The peak of the schedule."""
    schedule: AnySchedule = Cosine()
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient; never on norms and biases."""
    clip_norm: PositiveFloat | None = 1.0
    """Scale gradients down to this global norm; none leaves them."""
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Keep an exponential moving average of the parameters; evaluation and decoding then use it."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "OptimConfig":
        if isinstance(self.algorithm, Sgd) and self.algorithm.nesterov and not self.algorithm.momentum:
            raise ValueError("algorithm.nesterov=true with algorithm.momentum=0: set a momentum, such as 0.9")
        return self
