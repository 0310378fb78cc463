"""The typed config tree, and functions to load, override, validate, save and migrate configs."""

from jaxformer.config.base import Config as Config
from jaxformer.config.data import (
    ArrayRecordSource as ArrayRecordSource,
    ByteTokenizer as ByteTokenizer,
    DataConfig as DataConfig,
    DatesSource as DatesSource,
    DirectoryTokenizer as DirectoryTokenizer,
    HeldoutSplit as HeldoutSplit,
    HuggingFaceTokenizer as HuggingFaceTokenizer,
    JsonlSource as JsonlSource,
    MemorySource as MemorySource,
    ParallelSource as ParallelSource,
    SentencePieceTokenizer as SentencePieceTokenizer,
    Source as Source,
    StdlibSource as StdlibSource,
    TextSource as TextSource,
    Tokenizer as Tokenizer,
    TsvSource as TsvSource,
)
from jaxformer.config.files import (
    dump_config as dump_config,
    load_run_file as load_run_file,
    parse_config as parse_config,
)
from jaxformer.config.metrics import (
    ExactMatch as ExactMatch,
    MetricConfig as MetricConfig,
    Perplexity as Perplexity,
)
from jaxformer.config.model import (
    Activation as Activation,
    Alibi as Alibi,
    AttentionConfig as AttentionConfig,
    BandScaling as BandScaling,
    BlockConfig as BlockConfig,
    BucketBias as BucketBias,
    DynamicNtkScaling as DynamicNtkScaling,
    EmbeddingConfig as EmbeddingConfig,
    FanInInit as FanInInit,
    HeadConfig as HeadConfig,
    Init as Init,
    InitConfig as InitConfig,
    Learned as Learned,
    LinearScaling as LinearScaling,
    MlpConfig as MlpConfig,
    ModelConfig as ModelConfig,
    ModelShape as ModelShape,
    MoeConfig as MoeConfig,
    NormalInit as NormalInit,
    NormConfig as NormConfig,
    PoolerConfig as PoolerConfig,
    RecurrentConfig as RecurrentConfig,
    Rope as Rope,
    RopeScaling as RopeScaling,
    Sinusoidal as Sinusoidal,
    SpecialIds as SpecialIds,
    StackConfig as StackConfig,
    TransformConfig as TransformConfig,
    XavierInit as XavierInit,
    YarnScaling as YarnScaling,
)
from jaxformer.config.objectives import (
    OBJECTIVE_CONFIGS as OBJECTIVE_CONFIGS,
    Causal as Causal,
    ObjectiveConfig as ObjectiveConfig,
    Seq2Seq as Seq2Seq,
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
    ParameterSelector as ParameterSelector,
    RunConfig as RunConfig,
    StartConfig as StartConfig,
    TrainConfig as TrainConfig,
)
