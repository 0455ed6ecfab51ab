"""The chooser: the first kernel that can, or the one insisted on, or every reason why not; on
each platform, wherever it is asked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers.attention.kernel_comparison import example, rounding, value_and_gradients
from jax_attn.attention import dispatch, dot_product_attention, explain_kernel

ARRAYS = [jnp.ones((1, 2, 3, 5))] * 3


@pytest.fixture
def picky(monkeypatch):
    """A second kernel, tried first, that serves only calls without a softcap or a bias."""

    def refusals(call):
        reasons = []
        if call.softcap is not None:
            reasons.append("no softcap")
        if call.bias is not None:
            reasons.append("no bias")
        return reasons

    kernel = dispatch.Kernel(
        "picky", lambda call: call.query * 0 + 7, refusals, dispatch.no_reasons, "picky"
    )
    monkeypatch.setattr(dispatch, "KERNELS", {"picky": kernel, **dispatch.KERNELS})


@pytest.mark.usefixtures("picky")
class TestWithTwoKernels:
    def test_the_first_that_can_is_chosen(self):
        assert float(dot_product_attention(*ARRAYS)[0, 0, 0, 0]) == 7
        explanation = explain_kernel(*ARRAYS)
        assert explanation.chosen == "picky"
        assert explanation.refusals["dense"] == ("picky comes first",)

    @pytest.mark.slow
    def test_what_the_first_refuses_goes_to_the_next(self):
        assert np.array_equal(dot_product_attention(*ARRAYS, softcap=1.0), ARRAYS[2])
        explanation = explain_kernel(*ARRAYS, softcap=1.0)
        assert (explanation.chosen, explanation.refusals["picky"]) == ("dense", ("no softcap",))
        assert "not picky: no softcap" in str(explanation)

    def test_insisting_passes_over_the_first(self):
        assert np.array_equal(dot_product_attention(*ARRAYS, implementation="dense"), ARRAYS[2])

    def test_insisting_on_one_that_cannot_raises_with_every_reason(self):
        options = {"softcap": 1.0, "bias": jnp.ones((2, 2)), "implementation": "picky"}
        with pytest.raises(ValueError, match=r"(?s)picky.*no softcap.*no bias"):
            dot_product_attention(*ARRAYS, **options)
        explanation = explain_kernel(*ARRAYS, **options)
        assert explanation.chosen is None
        assert explanation.refusals == {"picky": ("no softcap", "no bias")}


def arrays(T, S, B=1, N=2, K=1, H=3):
    """query, key and value, abstract."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


# (T, S) on a CPU: the kernel that is faster there, and why dense, or blocked, is not chosen.
CHOICES = {
    "long": ((512, 512), "blocked", "blocked comes first"),
    "128 by 128": ((128, 128), "blocked", "blocked comes first"),
    "just below": ((127, 128), "dense", "below 16384 scores a head, here 127·128"),
    "short": ((5, 7), "dense", "fewer than 32 queries, here 5"),
    "one query, many keys": ((1, 65536), "dense", "fewer than 32 queries, here 1"),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_faster_one_is_chosen_and_the_other_says_why_not(name):
    (T, S), chosen, why = CHOICES[name]
    explanation = explain_kernel(*arrays(T, S))
    assert explanation.chosen == chosen
    other = {"blocked": "dense", "dense": "blocked"}[chosen]
    assert any(why in reason for reason in explanation.refusals[other])
    assert explanation.refusals["splash"] == ("it runs on tpu, not on cpu",)
    assert explanation.refusals["cudnn"][0] == "it runs on cuda, not on cpu"


# (platform, T = S, options): the kernel that is chosen there for float32, asked on any host
# without cuDNN, and a reason why.
SCORES = {"bias": jnp.ones((1, 1))}
ELSEWHERE = {
    "cuda": ("cuda", 8192, {}, "dense", "dense is preferred on cuda while its scores fit in 1 GiB"),
    "cuda, long": ("cuda", 16384, {}, "blocked", "not cudnn: it takes float16 and bfloat16"),
    "tpu": ("tpu", 8192, {}, "splash", "not blocked: dense is preferred on tpu"),
    "tpu, short": ("tpu", 127, {}, "dense", "it works on 128 queries and keys at least, here 127"),
    "tpu, bias": ("tpu", 8192, SCORES, "dense", "not splash: it adds no bias"),
    "tpu, long, bias": ("tpu", 16384, SCORES, "blocked", "not splash: it adds no bias"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_platforms_have_choices_of_their_own(name):
    platform, length, options, chosen, why = ELSEWHERE[name]
    explanation = explain_kernel(*arrays(length, length), **options)
    assert explanation.platform == "cpu"
    (there,) = (other for other in explanation.elsewhere if other.platform == platform)
    assert there.chosen == chosen
    assert why in str(there)
    assert f"\non {platform}, {chosen} runs: " in str(explanation)


@pytest.mark.parametrize(("backend", "platform"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_the_process_s_own_platform_comes_first(monkeypatch, backend, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    explanation = explain_kernel(*arrays(8192, 8192))
    assert (explanation.platform, explanation.chosen) == (
        platform,
        {"cuda": "dense", "tpu": "splash"}[platform],
    )
    assert {other.platform for other in explanation.elsewhere} == {*dispatch.PLATFORMS} - {platform}


def test_arrays_that_are_somewhere_say_where():
    with jax.default_device(jax.devices("cpu")[0]):
        assert explain_kernel(*ARRAYS).platform == "cpu"


class TestTracedForAnyPlatform:
    """A kernel that is TPUs' own marks its programs with a cosine; blocked has none."""

    @pytest.fixture(autouse=True)
    def own(self, monkeypatch):
        def run(call):
            return jnp.cos(call.query)

        kernel = dispatch.Kernel(
            "own", run, dispatch.no_reasons, dispatch.no_reasons, "TPUs' own", only_on="tpu"
        )
        monkeypatch.setattr(dispatch, "KERNELS", {"own": kernel, **dispatch.KERNELS})

    @pytest.mark.slow
    def test_each_platform_gets_its_kernel(self):
        (q, k, v) = arrays(128, 128)

        @jax.jit
        def attend(q, k, v):
            return dot_product_attention(q, k, v)

        for platform in dispatch.PLATFORMS:
            program = jax.export.export(attend, platforms=[platform])(q, k, v).mlir_module()
            assert ("stablehlo.cosine" in program) == (platform == "tpu")
        together = jax.export.export(attend, platforms=dispatch.PLATFORMS)(q, k, v)
        assert "stablehlo.cosine" in together.mlir_module()

    def test_insisting_on_it_elsewhere_says_where_it_runs(self):
        with pytest.raises(ValueError, match="it runs on tpu, not on cpu"):
            dot_product_attention(*ARRAYS, implementation="own")

    @pytest.mark.slow
    def test_an_eager_call_runs_the_kernel_of_its_device_and_traces_no_other(self, monkeypatch):
        def never(call):
            raise AssertionError("traced")

        kernel = dataclasses.replace(dispatch.KERNELS["own"], run=never)
        monkeypatch.setitem(dispatch.KERNELS, "own", kernel)
        x = jnp.ones((1, 128, 1, 4))
        dot_product_attention(x, x, x)
        jax.grad(lambda x: dot_product_attention(x, x, x).sum())(x)
        with pytest.raises(AssertionError, match="traced"):
            jax.jit(dot_product_attention)(x, x, x)

    @pytest.mark.slow
    def test_the_cpu_s_program_is_as_if_there_were_no_other(self):
        """Also where forward and backward are compiled apart: nothing more is kept between."""

        def loss(implementation, q, k, v):
            out = dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            return out.astype(jnp.float32).sum()

        def programs(implementation):
            of = functools.partial(loss, implementation)
            compiled = jax.jit(jax.value_and_grad(of)).lower(*arrays(256, 256)).compile()
            memory = compiled.memory_analysis()
            kept = jax.eval_shape(lambda *xs: jax.vjp(jax.jit(of), *xs)[1], *arrays(256, 256))
            bytes_kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
            return memory.temp_size_in_bytes, "conditional" in compiled.as_text(), bytes_kept

        chosen, insisted = programs(None), programs("blocked")
        assert insisted[1] is False
        index = 4  # the platform's, kept for the backward pass
        assert chosen == (*insisted[:2], insisted[2] + index)

    @pytest.mark.slow
    @pytest.mark.parametrize("home", ["cpu", "tpu"])
    def test_gradients_are_the_kernel_s_own_wherever_home_is(self, monkeypatch, home):
        """Compiled for the CPU: at home it keeps what its backward pass needs, else the call."""
        monkeypatch.setattr(dispatch, "home", lambda call: home)
        arrays = example(T=130, S=131)
        with jax.enable_x64(True):
            got = value_and_gradients(None, *arrays)
            want = value_and_gradients("dense", *arrays)
        for a, b in zip(got, want, strict=True):
            assert np.abs(a - b).max() <= rounding(arrays, b)

    @pytest.mark.slow
    @pytest.mark.parametrize("home", ["cpu", "tpu"])
    def test_second_derivatives_are_dense_s(self, monkeypatch, home):
        monkeypatch.setattr(dispatch, "home", lambda call: home)
        *arrays, cotangent = example(T=130, S=131)

        def penalty(implementation, q):
            def loss(q):
                out = dot_product_attention(q, *arrays[1:], implementation=implementation)
                return (out * cotangent).sum()

            return (jax.grad(loss)(q) ** 2).sum()

        with jax.enable_x64(True):
            got, want = (
                jax.jit(jax.grad(functools.partial(penalty, name)))(arrays[0])
                for name in (None, "dense")
            )
        assert np.abs(got - want).max() <= rounding([*arrays, cotangent], want)


@pytest.mark.parametrize("implementation", ["dense", "blocked"])
def test_the_one_insisted_on_runs_though_another_is_faster(implementation):
    for T in (2, 256):
        assert explain_kernel(*arrays(T, T), implementation=implementation).chosen == implementation


class TestInsistingOnARecord:
    """A kernel that no table knows, or a known one with other sizes, as a value."""

    def test_it_runs_and_explains_itself_by_its_name(self):
        own = dispatch.Kernel(
            "own",
            lambda call: call.query * 0 + 7,
            dispatch.no_reasons,
            dispatch.no_reasons,
            "is ours",
        )
        assert float(dot_product_attention(*ARRAYS, implementation=own)[0, 0, 0, 0]) == 7
        explanation = explain_kernel(*ARRAYS, implementation=own)
        assert (explanation.chosen, explanation.why) == ("own", "is ours")
        assert explanation.refusals["dense"] == ("own is required",)
        assert "own" not in dispatch.KERNELS

    def test_one_that_cannot_serve_raises_with_its_name_and_reasons(self):
        refusals, drawbacks = (lambda call: ["no"]), dispatch.no_reasons
        own = dispatch.Kernel("own", jnp.cos, refusals, drawbacks, "", only_on="tpu")
        message = r"(?s)implementation='own' cannot serve.*it runs on tpu, not on cpu.*no"
        with pytest.raises(ValueError, match=message):
            dot_product_attention(*ARRAYS, implementation=own)

    def test_one_of_a_known_name_stands_in_its_place(self):
        seven = dataclasses.replace(dispatch.KERNELS["dense"], run=lambda call: call.query * 0 + 7)
        assert float(dot_product_attention(*ARRAYS, implementation=seven)[0, 0, 0, 0]) == 7
        assert explain_kernel(*ARRAYS, implementation=seven).chosen == "dense"
        assert float(dot_product_attention(*ARRAYS)[0, 0, 0, 0]) == 1


def test_an_unknown_name_is_an_error_that_lists_the_known():
    for call in (dot_product_attention, explain_kernel):
        with pytest.raises(ValueError, match=r"implementation: .*'dense'.*'flash'"):
            call(*ARRAYS, implementation="flash")
