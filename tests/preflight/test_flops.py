"""FLOPs counted on the traced train step against XLA's own count of the unrolled one."""

import jax
import pytest

from jaxformer.config import ByteTokenizer, DataConfig, MemorySource, ModelConfig, RunConfig, Seq2Seq, TrainConfig
from jaxformer.models.bert import bert
from jaxformer.models.llama import llama
from jaxformer.models.t5 import t5
from jaxformer.preflight.flops import count_flops, visible_keys
from jaxformer.train.metrics import step_flops
from jaxformer.train.program import TrainProgram, train_program

SIZES = {"embed_dim": 256, "num_heads": 4, "mlp_dim": 512, "vocab_size": 1024}


def make_program(model: ModelConfig, remat: str = "none", unroll: str | int = "all", **data) -> TrainProgram:
    config = RunConfig(
        model=model,
        data=DataConfig(
            train=MemorySource(documents=("unused",)), tokenizer=ByteTokenizer(), length=64, batch_size=2, **data
        ),
        train=TrainConfig(remat=remat, unroll=unroll, attention="reference", loss_chunks=1),
    )
    return train_program(config, jax.devices()[:1])


def flops(program: TrainProgram) -> float:
    return count_flops(program.trace().jaxpr.jaxpr, visible_keys(program.config.model, 64), 1)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_decoder_flops_are_those_of_xla(remat):
    counted, by_xla = {}, {}
    for num_layers in (2, 4):
        program = make_program(llama(num_layers=num_layers, num_kv_heads=2, tied=False, **SIZES), remat)
        counted[num_layers] = flops(program)
        # Without the optimizer, which is elementwise and large in so small a model.
        update = 30 * sum(leaf.size for leaf in jax.tree.leaves(program.abstract_state.params))
        by_xla[num_layers] = program.lower().cost_analysis()["flops"] - update
    assert counted[4] == pytest.approx(by_xla[4], rel=0.02)
    deep = [count[4] + 38 * (count[4] - count[2]) for count in (counted, by_xla)]
    assert deep[0] == pytest.approx(deep[1], rel=0.02), "extrapolated to 80 layers"


def test_a_scan_counts_all_its_layers():
    model = llama(num_layers=6, num_kv_heads=2, tied=False, **SIZES)
    assert flops(make_program(model, unroll=1)) == pytest.approx(flops(make_program(model)))


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (t5(num_layers=2, head_dim=64, dropout=0.0, **SIZES), {"objective": Seq2Seq(input_length=64)}),
        (bert(num_layers=2, masked_lm=True, context_length=64, **SIZES), {"objective": {"kind": "masked"}}),
    ],
    ids=["t5", "bert"],
)
def test_other_shapes_are_close_to_the_model_flops(model, data):
    program = make_program(model, **data)
    # The reference kernel also computes the products that the causal mask hides, and the head of all positions.
    assert flops(program) == pytest.approx(step_flops(program.config), rel=0.06)
