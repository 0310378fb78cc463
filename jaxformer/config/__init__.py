"""The typed config tree: load, override, validate, save."""

from jaxformer.config.base import Config as Config
from jaxformer.config.data import (
    ArrayRecordSource as ArrayRecordSource,
    ByteTokenizer as ByteTokenizer,
    Causal as Causal,
    DataConfig as DataConfig,
    DatesSource as DatesSource,
    JsonlSource as JsonlSource,
    MemorySource as MemorySource,
    SentencePieceTokenizer as SentencePieceTokenizer,
    Seq2Seq as Seq2Seq,
    Source as Source,
    StdlibSource as StdlibSource,
    TextSource as TextSource,
    Tokenizer as Tokenizer,
    TsvSource as TsvSource,
)
from jaxformer.config.files import (
    load_json as load_json,
    load_run_file as load_run_file,
    save_json as save_json,
)
from jaxformer.config.model import (
    Activation as Activation,
    AttentionConfig as AttentionConfig,
    BlockConfig as BlockConfig,
    EmbeddingConfig as EmbeddingConfig,
    FanInInit as FanInInit,
    HeadConfig as HeadConfig,
    Init as Init,
    InitConfig as InitConfig,
    Learned as Learned,
    MlpConfig as MlpConfig,
    ModelConfig as ModelConfig,
    NormalInit as NormalInit,
    NormConfig as NormConfig,
    Rope as Rope,
    Sinusoidal as Sinusoidal,
    StackConfig as StackConfig,
    XavierInit as XavierInit,
)
from jaxformer.config.optim import (
    Adafactor as Adafactor,
    AdamW as AdamW,
    Constant as Constant,
    Cosine as Cosine,
    InverseSqrt as InverseSqrt,
    Linear as Linear,
    Lion as Lion,
    Muon as Muon,
    OptimConfig as OptimConfig,
    Sgd as Sgd,
    WarmupStableDecay as WarmupStableDecay,
)
from jaxformer.config.overrides import apply_overrides as apply_overrides
from jaxformer.config.run import (
    CheckpointConfig as CheckpointConfig,
    EvaluateConfig as EvaluateConfig,
    MeshConfig as MeshConfig,
    RunConfig as RunConfig,
    TrainConfig as TrainConfig,
)
