"""`parity.check` on a pair that a user brings: a right port passes and a wrong one fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from helpers.parity.block_pair import LAYOUT, D, FlaxBlock, T, pair
from helpers.parity.findings import kinds, sentences
from helpers.parity.functions import PortFunction, TorchFunction
from helpers.parity.one_reference import Once
from jax_attn.attention import Mask
from jax_attn.parity import ParityError, Verdict, check
from jax_attn.parity.run import TRANSFORMS
from jax_attn.transfer import LINEAR, Layout, export, load, row, tied

ONCE = Once()


@pytest.fixture(scope="module")
def ignored():
    return np.arange(T)[None] >= np.array([[T], [4]])


@pytest.fixture(scope="module")
def reference():
    return pair()[0]


def test_a_correct_port_passes_eager_and_jitted_and_neither_module_is_changed(x, ignored):
    reference, port = pair()
    before = {k: v.clone() for k, v in reference.state_dict().items()}, export(port, LAYOUT)
    passes(reference, port, (x, ignored), {"eager", "jit"})
    assert all(torch.equal(v, before[0][k]) for k, v in reference.state_dict().items())
    assert all(np.array_equal(v, before[1][k]) for k, v in export(port, LAYOUT).items())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_correct_port_passes_in_every_dtype(dtype, x, ignored):
    with jax.enable_x64(dtype == "float64"):
        passes(*pair(dtype), (x, ignored), {"jit"}, dtype=dtype, transforms=("jit",))


@pytest.mark.slow
def test_every_transform_passes_and_inputs_go_by_keyword(x, ignored):
    others = ("grad", "vmap", "remat")  # eager and jit are above
    passes(*pair(), {"x": x, "ignored": ignored}, {*others}, transforms=others)


def passes(reference, port, inputs, under, **options):
    result = check(reference, port, inputs, layout=LAYOUT, **options)
    assert result.verdict is Verdict.PASS, str(result)
    names = {(t.transform, t.label) for t in result.tensors}
    expected = {f"grad {name}" for name, _ in reference.named_parameters()} | {"output"}
    expected |= {f"grad input {'x' if isinstance(inputs, dict) else 0}"}
    assert names == {(t, name) for t in under for name in expected}
    assert kinds(result, "note") == []
    (scope,) = sentences(result, "scope")
    if isinstance(inputs, tuple):
        assert scope.startswith("checked at input 0 (2, 7, 30) and input 1 (2, 7) under ")


class WrongPolarity(FlaxBlock):
    def __call__(self, x, ignored=None):
        return super().__call__(x, ~ignored)


class WrongActivation(FlaxBlock):
    def __call__(self, x, ignored=None):
        mask = Mask.from_torch_mha(key_padding_mask=ignored)
        return self.head(jax.nn.hard_tanh(x + self.attention(self.norm(x), mask=mask)))


class StoppedGradient(FlaxBlock):
    def __call__(self, x, ignored=None):
        mask = Mask.from_torch_mha(key_padding_mask=ignored)
        y = self.attention(jax.lax.stop_gradient(self.norm(x)), mask=mask)
        return self.head(jnp.tanh(x + y))


class NaNInPadding(FlaxBlock):
    def __call__(self, x, ignored=None):
        y = super().__call__(x, ignored)
        return jnp.where(ignored[..., None], jnp.nan, y)


@pytest.mark.parametrize("port", [WrongPolarity, WrongActivation, StoppedGradient, NaNInPadding])
def test_a_wrong_port_fails(port, reference, x, ignored, monkeypatch):
    ONCE.patch(monkeypatch)
    backward = port is StoppedGradient  # the others' outputs are wrong, and compile sooner alone
    options = {"layout": LAYOUT, "transforms": ("jit",), "gradients": backward}
    result = check(reference, pair(port=port)[1], (x, ignored), **options)
    assert result.verdict is Verdict.FAIL
    labels = {t.label for t in result.tensors if t.verdict is not Verdict.PASS}
    assert ("output" in labels) != backward
    with pytest.raises(ParityError, match="FAIL"):
        result.raise_for_status()


@pytest.mark.slow
def test_a_weight_that_differs_in_one_bit_fails_and_names_its_row(x):
    reference, port = pair()
    kernel = port.attention.k_proj.kernel
    kernel[...] = kernel[...].at[3, 2, 1].set(jnp.nextafter(kernel[3, 2, 1], jnp.float32(9)))
    result = check(reference, port, (x,), layout=LAYOUT, gradients=False, transforms=("eager",))
    assert result.verdict is Verdict.FAIL
    (failure,) = sentences(result, "weights-differ")
    assert "'attention.in_proj_weight' differs in 1 of" in failure
    assert "attention.k_proj.kernel" in failure


@pytest.mark.slow
def test_several_outputs_pair_by_name_through_the_adapters(x):
    def reference_call(module, x):
        y = module.norm(x)
        output, weights = module.attention(y, y, y, average_attn_weights=False)
        return {"weights": weights, "output": output}

    def port_call(module, x):
        y = module.norm(x)
        return {"output": module.attention(y), "weights": module.attention.attention_weights(y)}

    reference, port = pair()
    options = {"reference_call": reference_call, "port_call": port_call, "transforms": ("jit",)}
    result = check(reference, port, {"x": x}, layout=LAYOUT, **options)
    assert result.verdict is Verdict.PASS, str(result)
    assert {"output", "weights"} <= {t.label for t in result.tensors}
    # The head takes no part: its gradient is zero on both sides.
    head = next(t for t in result.tensors if t.label == "grad head.weight")
    assert (head.error, head.scale) == (0.0, 0.0)


@pytest.mark.slow
def test_a_port_that_counts_its_calls_is_left_as_it_was(x):
    class Counting(nnx.Module):
        def __init__(self):
            self.calls, self.mean = nnx.Cache(jnp.int32(0)), nnx.BatchStat(jnp.zeros(D))

        def __call__(self, x):
            self.calls[...] += 1
            self.mean[...] = x.mean((0, 1))
            return 2 * x

    port = Counting()
    result = check(TorchFunction(lambda x: 2 * x), port, (x,), transforms=TRANSFORMS)
    assert result.verdict is Verdict.PASS, str(result)
    assert (port.calls[...], *port.mean[...]) == (0, *np.zeros(D))


def transposed(module, x):
    return jnp.swapaxes(module(x), 0, 1)


@pytest.mark.slow
def test_an_output_of_another_shape_fails_and_says_so(x):
    result = check(*pair(), (x,), layout=LAYOUT, port_call=transposed, transforms=TRANSFORMS)
    assert result.verdict is Verdict.FAIL
    shapes = "output: shape: expected (2, 7, 11), got (7, 2, 11)"
    assert sentences(result, "other-shape") == [f"{name} {shapes}" for name in TRANSFORMS]


@pytest.mark.slow
def test_a_check_compiles_even_under_jax_disable_jit(x):
    with jax.disable_jit():
        assert check(*pair(), (x,), layout=LAYOUT, transforms=("jit",)).verdict is Verdict.PASS


@pytest.mark.slow
def test_what_a_check_needs_more_than_once_is_computed_once(monkeypatch, x):
    passes = []

    def reference_call(module, x):
        passes.append((torch.is_inference_mode_enabled(), x.dtype))
        return module(x)

    ported = []
    to_torch = Layout.to_torch

    def counted(layout, arrays):
        ported.append(arrays)
        return to_torch(layout, arrays)

    monkeypatch.setattr(Layout, "to_torch", counted)
    options = {"layout": LAYOUT, "reference_call": reference_call, "transforms": ("jit",)}
    assert check(*pair(), (x,), **options).verdict is Verdict.PASS
    # A second pass in inference mode shows that the first repeats.
    assert passes.count((True, torch.float32)) == 2
    assert passes.count((False, torch.float32)) == 1
    assert len(ported) == 2, "the weights, and the gradients of the one transform"


@pytest.mark.slow
def test_a_frozen_reference_is_compared_like_any_other(x):
    reference, port = pair()
    frozen = reference.requires_grad_(False)
    result = check(frozen, port, (x,), layout=LAYOUT, transforms=("jit",))
    assert result.verdict is Verdict.PASS, str(result)
    assert "grad head.weight" in {t.label for t in result.tensors}


@pytest.mark.slow
def test_a_tied_reference_and_an_untied_port_fail():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    class Untied(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(5, 5, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(5, 5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.b(self.a(x))

    reference, port = Tied(), nnx.eval_shape(Untied)
    layout = Layout(LINEAR.under("a", "a"), LINEAR.under("b", "b"))
    load(port, reference.state_dict(), layout)
    x = np.random.default_rng(0).standard_normal((3, 5))
    result = check(reference, port, (x,), layout=layout, transforms=("eager",))
    assert result.verdict is Verdict.FAIL
    assert "ties 'b.weight'" in "\n".join(sentences(result, "weights-differ"))


@pytest.mark.parametrize("is_right", [True, False])
def test_a_parameter_is_found_under_the_name_that_the_table_ties_to_another(is_right):
    """torch names it by the first module that has it; here the table has a row for the second."""

    class HeadFirst(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.words = torch.nn.Linear(5, 7, bias=False), torch.nn.Embedding(7, 5)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    class Port(nnx.Module):
        def __init__(self):
            self.words = nnx.Embed(7, 5, rngs=nnx.Rngs(0))

        def __call__(self, ids):
            return self.words.attend(self.words(ids))

    reference, port = HeadFirst(), nnx.eval_shape(Port)
    layout = Layout(row("words.weight", "words.embedding"), tied("head.weight", "words.weight"))
    load(port, reference.state_dict(), layout)
    if not is_right:
        port.words.embedding.set_value(port.words.embedding[...].at[0, 0].add(1))
    result = check(reference, port, (np.array([[0, 3, 6]]),), layout=layout, transforms=("jit",))
    if is_right:
        assert "grad head.weight" in {t.label for t in result.tensors}
        assert result.verdict is not Verdict.FAIL, str(result)
    else:
        assert "'head.weight' differs in 1 of 35" in result.failures[0]
        assert "its row is words.weight -> words.embedding" in result.failures[0]


@pytest.mark.parametrize("fill", [float("-inf"), float("nan")])
@pytest.mark.parametrize("off", [0.0, 1e-4], ids=["right", "one element off"])
def test_what_is_not_finite_leaves_the_rest_compared(fill, off):
    filled = np.triu(np.ones((11, 7), bool), 1)
    reference = TorchFunction(lambda x: (3 * x).masked_fill(torch.from_numpy(filled), fill))
    port = PortFunction(lambda x: jnp.where(filled, fill, (3 * x).at[5, 2].add(off)))
    x = np.random.default_rng(0).standard_normal((11, 7))
    result = check(reference, port, (x,), gradients=False, transforms=("eager",))
    assert result.verdict is (Verdict.FAIL if off else Verdict.PASS), str(result)


@pytest.mark.slow
def test_integers_in_and_nothing_to_differentiate_are_compared_all_the_same():
    reference = TorchFunction(lambda i: torch.arange(5.0)[i] / 3)
    port = PortFunction(lambda i: jnp.arange(5.0)[i] / 3)
    result = check(reference, port, (np.array([[1, 2], [0, 4]]),))
    assert result.verdict is Verdict.PASS, str(result)
    assert {t.label for t in result.tensors} == {"output"}


@pytest.mark.parametrize("gradients", [True, False])
def test_a_reference_may_write_to_its_inputs(gradients):
    x = np.random.default_rng(0).standard_normal((5, 3))
    port = PortFunction(lambda x: jnp.where(x > 0, x, 0))
    result = check(
        torch.nn.ReLU(inplace=True), port, (x,), gradients=gradients, transforms=("jit",)
    )
    assert result.verdict is Verdict.PASS, str(result)
    assert "second-call-not-compared" not in kinds(result)
