"""What a compiled program sends, read from its text."""

import jax
import jax.numpy as jnp
import pytest
from jax import P

from helpers.attention.meshes import mesh, placed
from jax_attn.parity.run.traffic import Sent, sent

LINES = {
    "a sum": (
        "%all-reduce.3 = f32[8]{0:T(128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum",
        Sent("all-reduce", 32),
    ),
    "several sums in one": (
        "%s = (f32[2,7,5]{2,1,0}, /*index=1*/bf16[3]{0}, pred[], s8[2]) all-reduce(%a, %b, %c, %d)",
        Sent("all-reduce", 280 + 6 + 1 + 2),
    ),
    "an asynchronous one, whose start has its operand beside its result": (
        "%ag = (f32[4], f32[8]) all-gather-start(%y)\n %agd = f64[8] all-gather-done(%ag)",
        Sent("all-gather", 64),
    ),
    "the last of a computation": (
        "ROOT %cp = u32[3,2] collective-permute(%x), source_target_pairs={{0,1}}",
        Sent("collective-permute", 24),
    ),
    "a name in a note": (
        'ROOT %add = f32[8] add(%p, %p), metadata={op_name="all-reduce(not one)"}',
        None,
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_an_operation_is_found_once_with_the_bytes_of_its_result(name):
    line, expected = LINES[name]
    assert sent(f"ENTRY %main {{\n {line}\n}}") == ([] if expected is None else [expected])


def test_operations_come_in_the_program_s_order():
    lines = [line for line, _ in LINES.values()]
    assert sent("\n".join(lines)) == [each for _, each in LINES.values() if each]


def test_an_operation_in_a_loop_counts_for_each_turn():
    def body(x):
        def turn(carry, _):
            return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "rows") / 8, None), carry, length=3)

        return jax.lax.scan(turn, x, length=5)[0]

    on = mesh("auto", rows=8)
    run = jax.shard_map(body, mesh=on, in_specs=P("rows"), out_specs=P("rows"), check_vma=False)
    program = jax.jit(run).lower(jnp.ones((8, 3))).compile()
    assert sent(program.as_text()) == [Sent("all-reduce", 12, 15)]


def test_the_sums_of_a_real_program_are_found():
    (x,) = placed(mesh("auto", rows=8), [jnp.ones((16, 3))], [P("rows")])
    program = jax.jit(lambda x: x.sum(axis=0)).lower(x).compile()
    assert sent(program.as_text()) == [Sent("all-reduce", 12)]
