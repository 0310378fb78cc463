"""Checks that involve several fields: the error names the fields, their values and the fix."""

import pytest

from jaxformer.config import (
    AttentionConfig,
    BlockConfig,
    MemorySource,
    MeshConfig,
    MlpConfig,
    RunConfig,
    TrainConfig,
    apply_overrides,
)
from jaxformer.errors import UserError
from jaxformer.models.bert import bert

DECODER, ENCODER = "model.decoder.pattern.0", "model.encoder.pattern.0"
BIDIRECTIONAL = '{"attention": {"num_heads": 2, "head_dim": 4}, "mlp": {"kind": "mlp", "dim": 8}}'
BIDIRECTIONAL_ATTENTION = '{"num_heads": 4, "head_dim": 4}'
UNBOUNDED = ("model.embedding.position.kind=sinusoidal", "model.embedding.position.max_length=none")
WSD = ("optim.schedule.kind=wsd", "optim.schedule.warmup_steps=40", "optim.schedule.decay_steps=70")

DECODER_ONLY = {
    "kv heads do not divide": (
        [f"{DECODER}.attention.num_kv_heads=3"],
        ["model.decoder.pattern.0.attention", "num_heads=4", "num_kv_heads=3", "multiple"],
    ),
    "rotary positions of odd head_dim": (
        [f"{DECODER}.attention.position.kind=rope", f"{DECODER}.attention.head_dim=5"],
        ["model.decoder.pattern.0.attention", "head_dim=5", "even"],
    ),
    "a decoder that sees the future": (
        [f"{DECODER}.attention.causal=false"],
        ["model: decoder block 0", "attention.causal=false", "set true"],
    ),
    "cross-attention without an encoder": (
        [f"{DECODER}.cross_attention={BIDIRECTIONAL_ATTENTION}"],
        ["model: decoder block 0", "cross_attention is set", "encoder is none", "both", "neither"],
    ),
    "an odd number of rotated channels": (
        [f"{DECODER}.attention.position.kind=rope", f"{DECODER}.attention.position.fraction=0.75"],
        ["model.decoder.pattern.0.attention", "head_dim=4", "position.fraction=0.75", "rotates 3 channels", "even"],
    ),
    "a first layer that sees the future": (
        [f"model.decoder.first=[{BIDIRECTIONAL}]"],
        ["model: decoder block 0", "attention.causal=false", "set true"],
    ),
    "no norm before attention of a post-norm block": (
        [f"{DECODER}.attention_norm=false", f"{DECODER}.placement=post"],
        ["model.decoder.pattern.0", "attention_norm=false", "placement=pre", "not post"],
    ),
    "top_k larger than num_experts": (
        [f'{DECODER}.mlp={{"kind": "moe", "num_experts": 2, "top_k": 3, "dim": 8}}'],
        ["model.decoder.pattern.0.mlp", "top_k=3", "num_experts=2", "lower top_k"],
    ),
    "a relative bias for different numbers of heads": (
        ["model.decoder.relative_bias={}", f"model.decoder.first=[{BIDIRECTIONAL}]"],
        ["model.decoder", "relative_bias", "same num_heads"],
    ),
    "neither head nor classes on a decoder": (
        ["model.head=none"],
        ["head=none on a model with a decoder", "pooler.num_classes"],
    ),
    "a special id outside the vocabulary": (
        ["model.special.eos=[2, 300]"],
        ["special.eos=300", "vocabulary of 300"],
    ),
    "no layers": (
        ["model.decoder.num_layers=0"],
        ["model.decoder.num_layers = 0", "greater than 0"],
    ),
    "neither encoder nor decoder": (
        ["model.decoder=none"],
        ["encoder and decoder are both none", "at least one stack"],
    ),
    "a source vocabulary without a source": (
        ["model.source_vocab_size=300"],
        ["source_vocab_size=300", "decoder-only", "only an encoder-decoder has a source", "set it to none"],
    ),
    "a decoder without logits": (["model.head=none"], ["head=none", "set a head"]),
    "sinusoids of odd width": (
        ["model.embedding.position.kind=sinusoidal", "model.embed_dim=15"],
        ["embed_dim=15", "even"],
    ),
    "rows longer than learned positions": (
        ["data.length=33"],
        ["data.length=33", "model.embedding.position.max_length=32", "shorten", "raise"],
    ),
    "rows longer than the context": (
        ["model.context_length=12"],
        ["data.length=16", "model.context_length=12", "shorten", "raise"],
    ),
    "accumulation does not divide": (
        ["train.accumulate=3"],
        ["data.batch_size=8", "multiple of", "train.accumulate=3"],
    ),
    "loss chunks do not divide": (
        ["train.loss_chunks=5"],
        ["data.length=16", "multiple of", "train.loss_chunks=5"],
    ),
    "objective of another shape": (
        ['data.objective={"kind": "seq2seq", "input_length": 8}'],
        ["data.objective.kind=seq2seq", "encoder-decoder", "decoder-only", "one that trains such models: causal"],
    ),
    "classes from the first token of a causal decoder": (
        ["data.objective.kind=classify", "model.pooler.num_classes=2"],
        ["data.objective.kind=classify", "pooling mean or last", "decoder-only", "pooling=first num_classes=2"],
    ),
    "warm-up longer than the run": (
        ["optim.schedule.warmup_steps=200", "train.steps=100"],
        ["optim.schedule.warmup_steps=200", "train.steps=100", "shorten"],
    ),
    "warm-up and decay longer than the run": (
        [*WSD, "train.steps=100"],
        ["optim.schedule", "warmup_steps=40", "decay_steps=70", "train.steps=100", "shorten"],
    ),
    "vocabulary smaller than the byte tokenizer's": (["model.vocab_size=258"], ["model.vocab_size=258", "259"]),
    "exact match of a decoder-only model": (
        ['evaluate.metrics=[{"kind":"exact_match"}]', "checkpoint.keep_best=0"],
        ["evaluate.metrics.0.kind=exact_match", "encoder-decoder", "decoder-only", "remove that metric"],
    ),
    "nesterov without momentum": (
        ["optim.algorithm.kind=sgd", "optim.algorithm.nesterov=true"],
        ["optim", "algorithm.nesterov=true", "algorithm.momentum=0", "0.9"],
    ),
    "bfloat16 moments of an optimizer without momentum": (
        ["optim.algorithm.kind=sgd", "optim.moment_dtype=bfloat16"],
        ["optim", "moment_dtype=bfloat16", "algorithm.kind=sgd", "no momentum", "set moment_dtype=float32"],
    ),
    "bfloat16 moments of Adafactor": (
        ["optim.algorithm.kind=adafactor", "optim.moment_dtype=bfloat16"],
        ["optim", "moment_dtype=bfloat16", "algorithm.kind=adafactor", "factored", "adamw"],
    ),
    "two mesh axes of -1": (["mesh.fsdp=-1"], ["mesh", "data, fsdp", "-1", "only one"]),
    "a mesh axis of size zero": (["mesh.tensor=0"], ["mesh", "tensor=0", "size 1"]),
    "a negative mesh axis": (["mesh.tensor=-2"], ["mesh.tensor = -2", "-1"]),
    "context parallelism": (["mesh.context=2"], ["mesh", "context=2", "not yet", "set 1"]),
    "expert parallelism": (["mesh.expert=2"], ["mesh", "expert=2", "not yet", "set 1"]),
    "pipeline parallelism": (["mesh.stage=2"], ["mesh", "stage=2", "not yet", "set 1"]),
    "documents and pairs": (['data.train.pairs=[["a", "b"]]'], ["data.train", "exactly one of documents, pairs"]),
}

ENCODER_DECODER = {
    "an encoder without cross-attention": (
        [f"{DECODER}.cross_attention=none"],
        ["model: decoder block 0", "cross_attention is none", "encoder is set", "both", "neither"],
    ),
    "cross-attention without an encoder": (
        ["model.encoder=none"],
        ["model: decoder block 0", "cross_attention is set", "encoder is none", "both", "neither"],
    ),
    "cross-attention in the encoder": (
        [f"{ENCODER}.cross_attention={BIDIRECTIONAL_ATTENTION}"],
        ["model: encoder has cross_attention", "only a decoder"],
    ),
    "causal cross-attention": (
        [f"{DECODER}.cross_attention.causal=true"],
        ["model.decoder.pattern.0", "cross_attention", "causal=false"],
    ),
    "cross-attention in a window": (
        [f"{DECODER}.cross_attention.window=4"],
        ["model.decoder.pattern.0", "cross_attention", "window=none"],
    ),
    "rotary cross-attention": (
        [f"{DECODER}.cross_attention.position.kind=rope"],
        ["model.decoder.pattern.0", "cross_attention", "position=none"],
    ),
    "objective of another shape": (
        ["data.objective.kind=causal"],
        [
            "data.objective.kind=causal",
            "decoder-only",
            "encoder-decoder",
            "one that trains such models: seq2seq, span, ul2, infill, classify",
        ],
    ),
    "a source tokenizer without a source vocabulary": (
        ["data.source_tokenizer.kind=bytes"],
        ["data.source_tokenizer is set", "model.source_vocab_size is none", "data.source_tokenizer=none"],
    ),
    "a source vocabulary smaller than the bytes": (
        ["model.source_vocab_size=258"],
        ["model.source_vocab_size=258", "259 ids of the bytes tokenizer"],
    ),
    "source rows longer than learned positions": (
        ['model.embedding.position={"kind": "learned", "max_length": 16}', "data.objective.input_length=17"],
        ["data.objective.input_length=17", "model.embedding.position.max_length=16", "shorten", "raise"],
    ),
}


@pytest.mark.parametrize("case", DECODER_ONLY)
def test_decoder_only(run, case):
    _check_error(run, *DECODER_ONLY[case])


@pytest.mark.parametrize("case", ENCODER_DECODER)
def test_encoder_decoder(pair_run, case):
    _check_error(pair_run, *ENCODER_DECODER[case])


def test_a_pattern_longer_than_its_stack(run):
    block = run.model.decoder.pattern[0].model_dump_json()
    _check_error(
        run,
        [f"model.decoder.pattern=[{block}, {block}, {block}]"],
        ["model.decoder", "0 + 3 blocks", "num_layers=2", "raise num_layers or shorten the pattern"],
    )
    _check_error(
        run,
        [f"model.decoder.first=[{block}, {block}]"],
        ["model.decoder", "2 + 1 blocks", "num_layers=2", "raise num_layers or shorten the pattern"],
    )


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{DECODER}.attention.num_kv_heads=1"],
        [f"{DECODER}.attention.window=1"],
        ["data.length=32"],
        ["train.accumulate=8"],
        [*WSD, "train.steps=110"],
        # The warm-up of inverse_sqrt may be longer than the run.
        ["optim.schedule.kind=inverse_sqrt", "optim.schedule.warmup_steps=400", "train.steps=10"],
        ["mesh.data=2", "mesh.fsdp=-1"],
        ["model.vocab_size=259"],
        [*UNBOUNDED, "data.length=100000"],
        [f"{DECODER}.attention.position.kind=alibi"],
        [f"{DECODER}.attention.position.kind=rope", f"{DECODER}.attention.position.fraction=0.5"],
        [f"{DECODER}.attention_norm=false"],
        ["model.special.eos=[2, 299]"],
    ],
)
def test_boundary_values_are_accepted(run, overrides):
    assert isinstance(apply_overrides(run, overrides), RunConfig)


def test_encoder_attention_may_have_a_window(pair_run):
    changed = apply_overrides(pair_run, [f"{ENCODER}.attention.window=4"])
    assert changed.model.encoder.pattern[0].attention.window == 4


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="exactly one of documents, pairs and examples"):
        MemorySource()


def test_checks_apply_to_configs_built_in_python():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        AttentionConfig(num_heads=4, num_kv_heads=3, head_dim=4)
    attention = AttentionConfig(num_heads=4, head_dim=4, causal=True)
    with pytest.raises(ValueError, match="cross_attention must have causal=false"):
        BlockConfig(attention=attention, cross_attention=attention, mlp=MlpConfig(dim=4))


def test_places_of_a_pattern(run):
    """Five layers of a pattern of two: the last repeat is incomplete."""
    stack = apply_overrides(run, ["model.decoder.num_layers=5", f"model.decoder.pattern={_blocks(run, 8, 12)}"])
    stack = stack.model.decoder
    assert stack.sizes == {"blocks_0": 3, "blocks_1": 2}
    assert stack.places == (("blocks_0", 0), ("blocks_1", 0), ("blocks_0", 1), ("blocks_1", 1), ("blocks_0", 2))
    assert [stack.block(layer).mlp.dim for layer in range(5)] == [8, 12, 8, 12, 8]


def test_places_with_first_layers(run):
    """Two first layers, then the pattern from its start."""
    changes = [f"model.decoder.first={_blocks(run, 4, 5)}", f"model.decoder.pattern={_blocks(run, 8, 12)}"]
    stack = apply_overrides(run, ["model.decoder.num_layers=5", *changes]).model.decoder
    assert stack.sizes == {"first_0": 1, "first_1": 1, "blocks_0": 2, "blocks_1": 1}
    assert stack.places == (("first_0", 0), ("first_1", 0), ("blocks_0", 0), ("blocks_1", 0), ("blocks_0", 1))
    assert [stack.block(layer).mlp.dim for layer in range(5)] == [4, 5, 8, 12, 8]
    assert [block.mlp.dim for block in stack.blocks] == [4, 5, 8, 12]


def test_max_length_is_the_smaller_limit(run):
    shorter, longer = (apply_overrides(run, [f"model.context_length={n}"]).model for n in (20, 40))
    assert (run.model.max_length, shorter.max_length, longer.max_length) == (32, 20, 32)
    unbounded = apply_overrides(run, UNBOUNDED).model
    assert unbounded.max_length is None


def _blocks(run: RunConfig, *mlp_dims: int) -> str:
    """Blocks with these MLP widths, as the JSON value of an override."""
    block = run.model.decoder.pattern[0]
    different = (block.model_copy(update={"mlp": block.mlp.model_copy(update={"dim": dim})}) for dim in mlp_dims)
    return f"[{', '.join(block.model_dump_json() for block in different)}]"


def _check_error(config: RunConfig, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        apply_overrides(config, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "objectives"),
    [({}, "masked"), ({"num_classes": 2}, "classify"), ({"num_tags": 2, "masked_lm": True}, "masked, tag")],
)
def test_an_encoder_without_data_names_its_objectives(options, objectives):
    model = bert(num_layers=1, embed_dim=8, num_heads=2, mlp_dim=8, vocab_size=32, **options)
    with pytest.raises(UserError, match=rf"data\.objective\.kind for this model are {objectives}$"):
        RunConfig(model=model).check_data()


def test_a_config_without_data_and_model_raises():
    with pytest.raises(UserError, match=r"data is none.* to evaluate$"):
        RunConfig(train=TrainConfig(start="runs/earlier")).check_data()


def test_unknown_topologies_are_errors_with_the_nearest_ones():
    assert MeshConfig(topology="V5E-256").topology == "v5e-256"
    with pytest.raises(ValueError, match="there is no slice of 255 v5e: did you mean v5e-256"):
        MeshConfig(topology="v5e-255")
