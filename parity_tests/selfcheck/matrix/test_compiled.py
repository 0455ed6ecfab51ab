"""Compilers for devices that are not here. Where libtpu is absent, each test of the TPU compiler
checks that it is refused with the line that installs it; nothing is skipped."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

from jax_attn.parity.run import compiled
from jax_attn.parity.run.compiled import compile_for_tpu, lower_everywhere, why_no_tpu_compiler
from jax_attn.selfcheck.matrix import tpu
from jax_attn.selfcheck.matrix.rows import COMPILED_KERNELS

T, D, H = 5, 13, 7
SHAPES = (jax.ShapeDtypeStruct((T, D), "float32"), jax.ShapeDtypeStruct((D, H), "float32"))
FLOAT32_BYTES = 4


def product(a, b):
    return a @ b


def gradient(a, b):
    return jax.grad(lambda a, b: jnp.tanh(a @ b).sum(), argnums=(0, 1))(a, b)


FUNCTIONS = {"product": product, "gradient": gradient, "jitted": jax.jit(product)}


def compiled_or_refused(compile_it, *args, **kwargs):
    """What the TPU compiler gives; None where there is none, once it has said so rightly."""
    if why_no_tpu_compiler() is None:
        return compile_it(*args, **kwargs)
    with pytest.raises(RuntimeError, match=r"pip install 'jax-attn\[tpu\]'"):
        compile_it(*args, **kwargs)
    return None


# ---------------------------------------------------------------- the TPU compiler


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_report_is_plain_data(fn):
    report = compiled_or_refused(compile_for_tpu, fn, *SHAPES)
    if report is not None:
        assert report.keys() == {
            *("target", "compiler", "seconds", "flops", "bytes", "temporaries"),
            *("arguments", "outputs", "collectives"),
        }
        assert report["target"] == "TPU v5 lite (v5e:2x2)"
        assert re.fullmatch(r"libtpu \d+(\.\d+)+", report["compiler"])
        assert report["seconds"] > 0
        assert report["collectives"] == []


def test_the_numbers_are_those_of_the_function():
    report = compiled_or_refused(compile_for_tpu, product, *SHAPES)
    if report is not None:
        assert report["flops"] == 2 * T * D * H
        # The device holds arrays in tiles, so memory may be more than the elements', never less.
        assert report["arguments"] >= FLOAT32_BYTES * (T * D + D * H)
        assert report["outputs"] >= FLOAT32_BYTES * T * H
        assert report["temporaries"] >= 0
        assert report["bytes"] >= FLOAT32_BYTES * (T * D + D * H + T * H)
        both = compile_for_tpu(gradient, *SHAPES)
        assert both["flops"] >= 3 * report["flops"], "the product and its two transposes"
        assert both["outputs"] >= FLOAT32_BYTES * (T * D + D * H)


def test_arrays_serve_as_abstract_arguments_and_another_topology_is_another_target():
    arrays, newer = {"a": np.zeros((T, D), np.float32), "b": jnp.zeros((D, H))}, "v6e:2x2"
    of = functools.partial(compile_for_tpu, topology=newer)
    report = compiled_or_refused(of, lambda x: x["a"] @ x["b"], arrays)
    if report is not None:
        assert report["flops"] == 2 * T * D * H
        assert report["target"] == "TPU v6 lite (v6e:2x2)"


def overfull(a):
    """More than the memory of any TPU."""
    return jnp.sort(jnp.broadcast_to(a[:, :, None, None], (T, D, 2**15, 2**15)), axis=0)


# what is compiled, for which topology, the error and what it says
REFUSED = {
    "more than the memory": (overfull, "v5e:2x2", jax.errors.JaxRuntimeError, "memory"),
    "no topology": (lambda a: a, "v99:1x1", ValueError, "topology: libtpu does not take 'v99:1x1'"),
}


@pytest.mark.parametrize(("fn", "topology", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_compiled_raises(fn, topology, error, message):
    if why_no_tpu_compiler() is not None:
        error, message = RuntimeError, r"pip install 'jax-attn\[tpu\]'"
    with pytest.raises(error, match=message):
        compile_for_tpu(fn, SHAPES[0], topology=topology)


def test_without_libtpu_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    line = "pip install 'jax-attn[tpu]'"
    assert why_no_tpu_compiler() == f"the TPU compiler, libtpu, is not installed: {line}"
    with pytest.raises(RuntimeError, match=re.escape(line)):
        compile_for_tpu(product, *SHAPES)


def test_a_libtpu_that_does_not_load_is_a_reason(monkeypatch):
    def broken(topology):
        raise OSError("libtpu.so: wrong ELF class\nand more")

    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(compiled, "_device", broken)
    assert why_no_tpu_compiler().endswith("does not load: libtpu.so: wrong ELF class")


def test_arguments_on_a_slice_are_compiled_for_it_and_others_are_not():
    def on(topology):
        cut = compiled.mesh_for_tpu(topology, {"data": 2, "heads": 4}, AxisType.Auto)
        return jax.ShapeDtypeStruct((2, 8, 128), "float32", sharding=NamedSharding(cut, P("data")))

    here = SingleDeviceSharding(jax.devices("cpu")[0])
    on_cpu = jax.ShapeDtypeStruct((2, 8, 128), "float32", sharding=here)
    total = functools.partial(jnp.sum, axis=0)
    report = compiled_or_refused(compile_for_tpu, total, on_cpu)
    if report is None:
        with pytest.raises(RuntimeError, match="libtpu"):
            on("v5e:2x4")
        return
    assert report["collectives"] == []
    found = compile_for_tpu(total, on("v5e:2x4"), topology="v5e:2x4")
    assert (found["collectives"], found["target"]) == (["all-reduce"], "TPU v5 lite (v5e:2x4)")
    # Of another slice: compiled for one device of the topology that is named.
    assert compile_for_tpu(total, on("v6e:2x4"))["collectives"] == []


# ------------------------------------------------------------------------ rows of the report

REPORTED = {"seconds", "bytes", "temporaries", "arguments", "outputs", "collectives", "compiler"}
SUBJECT = ("x", "forward", "float32", "small")


def test_each_topology_has_a_row_with_what_the_compiler_counted():
    rows = [*tpu.compiled_everywhere(SUBJECT, product, SHAPES, tpu.TOPOLOGIES)]
    if missing := why_no_tpu_compiler():
        assert [row.target for row in rows] == list(tpu.TOPOLOGIES)
        assert all(row.level == "failed" and missing in row.error for row in rows)
        return
    targets = [row.target.partition("(")[2].rstrip(")") for row in rows]
    assert targets == list(tpu.TOPOLOGIES)
    for row in rows:
        assert row.figures.keys() >= REPORTED
        assert (row.design, row.level, row.figures["flops_by"]) == ("x", "compiled", "compiler")
        assert row.figures["flops"] == 2 * T * D * H


def test_what_a_topology_s_compiler_does_not_take_is_a_row_that_says_why():
    rows = [*tpu.compiled_everywhere(SUBJECT, overfull, SHAPES[:1], ["v5e:2x2"])]
    assert [(row.level, row.target) for row in rows] == [("failed", "v5e:2x2")]
    assert (why_no_tpu_compiler() or "memory") in rows[0].error


ON_MESHES = {
    "blocked": ["blocked, data=2, heads=4 (Auto)", "blocked, data=2, heads=4 (Explicit)"],
    "splash": ["splash, data=2, heads=4 (Explicit)"],
}


def rows_of_kernel(name):
    """What `verify` lists of a kernel; nothing without a compiler, once it has said so rightly."""
    rows = [*tpu.compile_kernel(name)]
    if missing := why_no_tpu_compiler():
        assert [(row.level, row.error) for row in rows] == [("not compiled", missing)] * 2
        return []
    return rows


@pytest.mark.parametrize("name", COMPILED_KERNELS)
def test_a_kernel_that_is_cut_by_a_slice_sends_nothing(monkeypatch, name):
    monkeypatch.setattr(tpu, "TOPOLOGIES", ())
    if not (rows := rows_of_kernel(name)):
        return
    wanted = [(f"kernel {at}", way) for at in ON_MESHES[name] for way in ("forward", "gradient")]
    assert [(row.design, row.direction) for row in rows] == wanted
    assert all(row.level == "compiled" and row.figures["collectives"] == [] for row in rows)


@pytest.mark.parametrize("name", COMPILED_KERNELS)
def test_a_kernel_s_rows_have_its_memory_and_the_flops_of_the_formula(monkeypatch, name):
    monkeypatch.setattr(tpu, "TOPOLOGIES", ("v5e:2x2",))
    monkeypatch.setattr(tpu, "_KINDS", {name: ()})
    if not (rows := rows_of_kernel(name)):
        return
    queries, keys, head = 4, 2, 64
    length, heads = 256, queries + 2 * keys
    seen = queries * sum(range(1, length + 1))  # scores, where each query sees itself and before
    element = 2  # bytes
    for row, direction, products in zip(rows, ("forward", "gradient"), (2, 7), strict=True):
        assert row.figures.keys() >= REPORTED
        assert (row.design, row.direction) == (f"kernel {name}", direction)
        assert (row.level, row.figures["flops_by"]) == ("compiled", "formula")
        assert row.figures["flops"] == products * 2 * head * seen
        assert row.figures["collectives"] == []
        assert row.figures["arguments"] >= element * length * heads * head
        outputs = queries if direction == "forward" else heads
        assert row.figures["outputs"] >= element * length * head * outputs


# ------------------------------------------------------ what emulation takes from the compiler

# Passes of the matrix unit, read off the compiler's own estimate: see emulate.UNITS["mxu"].
PASSES = {
    "float32 high": ("float32", "high", 3),
    "bfloat16 highest": ("bfloat16", "highest", 1),
    "float16 default": ("float16", "default", 1),
    "float16 high": ("float16", "high", 3),
}


@functools.cache
def cycles(dtype: str, precision: str) -> int:
    shape = jax.ShapeDtypeStruct((2048, 2048), dtype)  # large: the unit's time is what counts

    def square(a, b):
        return jnp.matmul(a, b, precision=precision)

    text = compiled._compile(square, (shape, shape), "v5e:2x2").as_text()
    (estimate,) = re.findall(r'estimated_cycles":"(\d+)"', text)
    return int(estimate)


@pytest.mark.parametrize(("dtype", "precision", "passes"), PASSES.values(), ids=PASSES)
def test_the_matrix_unit_takes_the_passes_that_are_emulated(dtype, precision, passes):
    estimate = compiled_or_refused(cycles, dtype, precision)
    if estimate is not None:
        # Within an eighth, since loads and conversions share the time; one pass and three are
        # not that close. (Six, float32 at HIGHEST, took 5.7 times, and long to compile.)
        assert abs(estimate / cycles("float32", "default") / passes - 1) < 1 / 8


# -------------------------------------------------------------------- the host is left alone

AFTERWARDS = """
import os, jax, jax.numpy as jnp
from jax_attn.parity.run.compiled import compile_for_tpu, why_no_tpu_compiler
first = {probe_first} and jax.default_backend()
environment = dict(os.environ)
reason = why_no_tpu_compiler()
if reason is None:
    compile_for_tpu(lambda a: a @ a, jax.ShapeDtypeStruct((8, 8), "float32"))
added = sorted(set(os.environ) - set(environment))
assert jax.default_backend() == (first or "cpu"), jax.default_backend()
assert jnp.ones(3).sum() == 3
print(reason, added)
"""


def process_that_compiles(probe_first: bool, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", AFTERWARDS.format(probe_first=probe_first)],
        env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_the_backend_and_the_environment_stay_as_they_are_in_processes_at_once():
    """With the platform pinned before, and with jax left to choose it; side by side, since
    libtpu guards itself with a lock file."""
    at_once = [
        process_that_compiles(probe_first=True),
        process_that_compiles(probe_first=False, JAX_PLATFORMS="cpu"),
        process_that_compiles(probe_first=True, JAX_PLATFORMS="cpu"),
    ]
    for process in at_once:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        reason, added = output.strip().splitlines()[-1].rsplit(" [", 1)
        assert reason == str(why_no_tpu_compiler())
        # jax itself leaves word of where it found libtpu.
        assert set(re.findall(r"\w+", added)) <= {"TPU_LIBRARY_PATH"}


def test_this_process_still_runs_on_its_cpu():
    compiled_or_refused(compile_for_tpu, product, *SHAPES)
    assert jax.default_backend() == "cpu"
    assert jax.jit(product)(jnp.ones((T, D)), jnp.ones((D, H))).devices() == {jax.devices("cpu")[0]}
    assert not os.environ.keys() & compiled.LIBTPU_ENVIRONMENT.keys()


# ------------------------------------------------------------------- lowering, everywhere


@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)
def test_every_platform_is_lowered_for(fn):
    reports = lower_everywhere(fn, *SHAPES)
    assert list(reports) == ["cpu", "cuda", "tpu"]
    for report in reports.values():
        assert report["error"] is None
        assert report["operations"] > 0
        assert report["custom_calls"] == []
        assert report["seconds"] > 0


def test_a_platform_that_refuses_says_so_and_the_others_go_on():
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2

    def doubled(x):
        return pl.pallas_call(kernel, out_shape=x)(x)

    shape = jax.ShapeDtypeStruct((8, 128), "float32")
    reports = lower_everywhere(doubled, shape, platforms=("cpu", "tpu"))
    assert "interpret mode" in reports["cpu"]["error"]
    assert reports["cpu"]["operations"] is None
    assert reports["tpu"]["error"] is None
    assert reports["tpu"]["custom_calls"] == ["tpu_custom_call"]


def test_a_function_that_cannot_be_traced_raises_its_own_error():
    with pytest.raises(TypeError, match="contracting dimensions"):
        lower_everywhere(product, SHAPES[1], SHAPES[0].update(shape=(T + 1, D)))


@pytest.mark.parametrize("call", [lower_everywhere, compile_for_tpu])
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (3, r"abstract_args\[1\]\['x'\]: expected something with shape and dtype, got 3"),
        (np.zeros(2), r"abstract_args\[1\]\['x'\]: jax would make float32 of float64"),
    ],
    ids=["no shape", "float64 without x64"],
)
def test_bad_leaves_are_refused_by_name(call, leaf, message):
    if call is compile_for_tpu and why_no_tpu_compiler() is not None:
        compiled_or_refused(call, lambda a, b: a, SHAPES[0], {"x": leaf})
    else:
        with pytest.raises(ValueError, match=message):
            call(lambda a, b: a, SHAPES[0], {"x": leaf})
