"""HBM traffic from HLO text: slices, updates in place, loops, and arrays in other memories."""

from jaxformer.preflight.hlo import Program
from jaxformer.preflight.traffic import array_bytes, hbm_bytes


def traffic(*lines: str, others: str = "") -> int:
    body = "\n".join(f"  {line}" for line in lines)
    return hbm_bytes(Program(f"{others}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"))


def test_instructions_read_operands_and_write_results():
    lines = ["%p = f32[64,32]{1,0} parameter(0)", "%q = f32[32,16]{1,0} parameter(1)"]
    product = "%d = f32[64,16]{1,0} dot(%p, %q), lhs_contracting_dims={1}"
    assert traffic(*lines, product) == 4 * (64 * 32 + 32 * 16 + 64 * 16)
    assert traffic(*lines, "%b = f32[2048]{0} bitcast(%p)", "%t = (f32[64,32]{1,0}) tuple(%p)") == 0


def test_a_loop_counts_every_iteration():
    others = """%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %p = (s32[], f32[16]{0}) parameter(0)
  %x = f32[16]{0} get-tuple-element(%p), index=1
  %y = f32[16]{0} negate(%x)
  ROOT %t = (s32[], f32[16]{0}) tuple(%i, %y)
}
%cond (p: (s32[], f32[16])) -> pred[] {
  %p = (s32[], f32[16]{0}) parameter(0)
  %n = s32[] constant(7)
}
"""
    loop = "%w = (s32[], f32[16]{0}) while(%t), condition=%cond, body=%body"
    assert traffic(loop, others=others) == 7 * 2 * 64


def test_a_fusion_reads_slices_and_writes_updates():
    others = """%sliced (a: f32[80,64], i: s32[]) -> f32[64] {
  %a = f32[80,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,64]{1,0} dynamic-slice(%a, %i, %z), dynamic_slice_sizes={1,64}
}
%updated (a: f32[80,64], u: f32[1,64], i: s32[]) -> f32[80,64] {
  %a = f32[80,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %r = f32[80,64]{1,0} dynamic-update-slice(%a, %u, %i, %z)
}
"""
    whole, index = "%p = f32[80,64]{1,0} parameter(0)", "%i = s32[] parameter(1)"
    row = "%u = f32[1,64]{1,0} parameter(2)"
    read = "%f = f32[1,64]{1,0} fusion(%p, %i), kind=kLoop, calls=%sliced"
    assert traffic(whole, index, read, others=others) == 2 * 256 + 4, "the slice, its result and the index"
    write = "%f = f32[80,64]{1,0} fusion(%p, %u, %i), kind=kLoop, calls=%updated"
    assert traffic(whole, index, row, write, others=others) == 3 * 256 + 4


def test_buffers_that_a_fusion_passes_on_do_not_count():
    others = """%passes (x: f32[16], b: f32[64]) -> (f32[16], f32[64]) {
  %x = f32[16]{0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %y = f32[16]{0} negate(%x)
  ROOT %t = (f32[16]{0}, f32[64]{0}) tuple(%y, %b)
}
"""
    operands = ["%p = f32[16]{0} parameter(0)", "%q = f32[64]{0} parameter(1)"]
    call = "%f = (f32[16]{0}, f32[64]{0}) fusion(%p, %q), kind=kCustom, calls=%passes"
    assert traffic(*operands, call, others=others) == 2 * 64 + 2 * 256
    assert traffic(*operands, call + ", output_to_operand_aliasing={{1}: (1, {})}", others=others) == 2 * 64


def test_arrays_in_other_memories_do_not_count():
    assert array_bytes("bf16[8,128]{1,0:T(8,128)(2,1)}") == 2048
    assert array_bytes("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == 0
    assert array_bytes("(f32[4]{0:T(128)S(1)}, f32[16]{0}, u32[]{:S(2)})") == 64
