"""Collectives from HLO text: loops, asynchronous pairs, fusions of the TPU compiler, and mesh axes."""

import pytest

from jaxformer.preflight.hlo import Collective, Program

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
FSDP = "{{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}"


def collectives(*lines: str, others: str = "") -> list[Collective]:
    body = "\n".join(f"  {line}" for line in lines)
    return Program(f"{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n").collectives(MESH)


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        (FSDP, "fsdp"),
        ("{{0,1},{2,3},{4,5},{6,7},{8,9},{10,11},{12,13},{14,15}}", "tensor"),
        ("{{0,2},{4,6},{1,3},{5,7},{8,10},{12,14},{9,11},{13,15}}", "fsdp"),  # half of it, one axis of a torus
        ("[2,8]<=[16]", "fsdp+tensor"),
        ("[4,4]<=[2,4,2]T(0,2,1)", "fsdp"),
        ("[8,2]<=[2,8]T(1,0)", "data"),
        ("{}", "data+fsdp+tensor"),
    ],
)
def test_groups_of_devices_become_mesh_axes(groups, axis):
    line = f"%a = bf16[64,32]{{1,0}} all-gather(%p), replica_groups={groups}, dimensions={{0}}"
    assert collectives(line) == [Collective("all-gather", axis, 1, 64 * 32 * 2)]


def test_sizes_are_those_of_whole_arrays():
    gathered = f"%a = bf16[64,32]{{1,0}} all-gather(%p), replica_groups={FSDP}"
    scattered = f"%b = f32[16,32]{{1,0}} reduce-scatter(%p), replica_groups={FSDP}, to_apply=%add"
    reduced = f"%c = (f32[16]{{0}}, bf16[2]{{0}}) all-reduce(%p, %q), replica_groups={FSDP}, to_apply=%add"
    found = {each.kind: each for each in collectives(gathered, scattered, reduced)}
    assert {kind: each.bytes for kind, each in found.items()} == {
        "all-gather": 64 * 32 * 2,
        "reduce-scatter": 4 * 16 * 32 * 4,
        "all-reduce": 16 * 4 + 2 * 2,
    }
    assert found["all-reduce"].wire_bytes == 2 * found["all-reduce"].bytes
    assert found["all-gather"].wire_bytes == found["all-gather"].bytes


def test_an_asynchronous_pair_counts_once():
    start = f"%s = (f32[4]{{0}}, f32[16]{{0}}) all-gather-start(%p), replica_groups={FSDP}"
    assert collectives(start, "%d = f32[16]{0} all-gather-done(%s)") == [Collective("all-gather", "fsdp", 1, 64)]
    others = f"""%wrapped (p: f32[16]) -> f32[4] {{
  ROOT %r = f32[4]{{0}} reduce-scatter(%p), replica_groups={FSDP}, to_apply=%add
}}"""
    start = "%s = ((f32[16]{0}), f32[4]{0}) async-start(%p), calls=%wrapped"
    done = "%d = f32[4]{0} async-done(%s)"
    assert collectives(start, done, others=others) == [Collective("reduce-scatter", "fsdp", 1, 64)]


def test_a_permutation_has_the_axes_between_its_pairs():
    line = "%a = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}"
    assert collectives(line) == [Collective("collective-permute", "tensor", 1, 16)]


def test_loops_are_multiplied_out():
    others = f"""%inner (p: f32[16]) -> f32[16] {{
  ROOT %r = f32[16]{{0}} all-reduce(%p), replica_groups={FSDP}, to_apply=%add
}}
%below_3 (p: s32[]) -> pred[] {{
  %limit = s32[] constant(3)
  ROOT %lt = pred[] compare(%p, %limit), direction=LT
}}
%outer (p: f32[16]) -> f32[16] {{
  ROOT %w = f32[16]{{0}} while(%p), condition=%unknown, body=%inner, backend_config={{"known_trip_count":{{"n":"5"}}}}
}}"""
    loop = "%w = f32[16]{0} while(%p), condition=%below_3, body=%outer"
    assert collectives(loop, others=others) == [Collective("all-reduce", "fsdp", 15, 15 * 64)]


def test_fusions_of_the_tpu_compiler():
    """A collective that is split over fusions is counted where it starts; all-reduce-scatter is a reduce-scatter."""
    gather = f"%g = f32[16]{{0}} all-gather(%p), replica_groups={FSDP}"
    others = f"""%fused_start (p: f32[4]) -> f32[16] {{
  {gather}
  ROOT %c = f32[16]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}
%fused_product (p: f32[4]) -> f32[16] {{
  {gather}
}}
%fused_done (p: f32[4]) -> f32[16] {{
  {gather}
  ROOT %c = f32[16]{{0}} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}
%all-reduce-scatter.1 (p: f32[16]) -> f32[4] {{
  %r = f32[16]{{0}} all-reduce(%p), replica_groups={FSDP}, to_apply=%add
  ROOT %s = f32[4]{{0}} dynamic-slice(%r, %i), dynamic_slice_sizes={{4}}
}}"""
    names = ("fused_start", "fused_product", "fused_done", "all-reduce-scatter.1")
    lines = [f"%f{i} = f32[16]{{0}} fusion(%p), kind=kCustom, calls=%{name}" for i, name in enumerate(names)]
    found = {each.kind: each for each in collectives(*lines, others=others)}
    assert found == {
        "all-gather": Collective("all-gather", "fsdp", 1, 64),
        "reduce-scatter": Collective("reduce-scatter", "fsdp", 1, 64),
    }
