"""Small modules of every shape: the written file computes what torch computes."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.small_modules import turned_twice
from jax_attn.translate import translate
from jax_attn.translate.outputs import called
from jax_attn.translate.proof import loaded
from jax_attn.translate.tracing.problems import TranslationError

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
SEQUENCE = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(1))
Both = collections.namedtuple("Both", "hidden out")


class Body(nn.Module):
    """A module with one linear layer, `a`, further parts, and the forward of a row."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        for name, part in parts.items():
            setattr(self, name, part)


def body(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    return type("Written", (Body,), {"forward": forward})(**parts)


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.a(x) if y is None else self.a(x) * y


def block(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.a(x))

    return Block()


def in_place(self, x):
    y = self.a(x)
    y[0] = 0
    y.mul_(2)
    return y


def without_gradient(self, x):
    with torch.no_grad():
        gate = self.a(x)
    return gate * x


def states(self, x):
    h, (a, c) = self.part(x[None])
    return h, a, c


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) * gate


def with_two_gates(self, x):
    """Give the layers of one list a gate of two kinds, as models with two kinds of masks do."""
    wide, narrow = torch.sigmoid(x), torch.cos(x)
    for i, layer in enumerate(self.parts):
        x = layer(x, narrow if i in (2, 3) else wide)
    return x


def looped(self, x):
    for layer in self.parts:
        x = torch.tanh(layer(x))
    return x


def residuals(self, x):
    before = x
    x = self.a(x)
    y = x
    x = torch.tanh(x)
    x = x * 2 + y
    z = x
    x = x * before
    return x + z, before, y


def lowest_bits(self, x):
    lowest = (x * 8).int() & torch.ones((), dtype=torch.bool)
    return lowest * self.a(x)


class Scaler(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(1, keepdim=True)
        x = torch.tanh(x - mean) * 2 + x
        x = torch.relu(x) - mean * x
        return x * x + mean, mean


class Holds(nn.Module):
    """Is so short that it is written where it is called, and has a child that is a class."""

    def __init__(self) -> None:
        super().__init__()
        self.scaler = Scaler()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.scaler(x)


def scaled(self, x):
    scaled, mean = self.part(x)
    return self.a(scaled) + mean


def names_of_the_file(self, x):
    jnp = self.a(x)
    nnx = jnp * 2
    jax = jnp + nnx
    return nn.functional.silu(jax) * jnp + nnx * jax


def called_before_its_argument_changes(self, x):
    found = []
    found.append(self.a(x))
    x = x + 1
    found.append(x * 2)
    return torch.cat(found) * torch.cat([x, x])


def gate(y):
    x = y + 1
    return nn.functional.threshold(x, 0.1, 0.0)


def with_a_helper_that_has_its_names(self, x):
    y = self.a(x)
    return gate(y) * x


def hooked() -> nn.Module:
    part = nn.Linear(5, 5)
    part.register_forward_hook(lambda module, inputs, output: output * 2)
    return body(lambda self, x: self.part(self.a(x)), part=part)


def patched() -> nn.Module:
    part = nn.Linear(5, 5)
    part.forward = lambda x: nn.functional.linear(x, part.weight) * 3
    return body(lambda self, x: self.part(self.a(x)), part=part)


def watched() -> nn.Module:
    def watch(module, inputs, output):
        watched.seen = output.shape

    made = body(lambda self, x: self.a(x))
    made.a.register_forward_hook(watch)
    return made


def weight_normed() -> nn.Module:
    part = nn.utils.weight_norm(nn.Linear(5, 5))
    return body(lambda self, x: self.part(self.a(x)), part=part)


def special_numbers() -> nn.Module:
    made = body(
        lambda self, x: torch.cat([self.none, torch.maximum(self.a(x) * self.bit, self.low)])
    )
    made.register_buffer("none", torch.zeros(0, 5))
    made.register_buffer("low", torch.full((5,), float("-inf")), persistent=False)
    made.register_buffer("bit", torch.tensor([[False], [True], [True]]))
    made.bit[0] = False
    return made


def state_of_other_dtypes() -> nn.Module:
    made = body(lambda self, x: self.a(x)[self.rows] * self.wide[0] + self.start.real)
    made.rows = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    made.start = nn.Parameter(torch.randn(5, dtype=torch.complex64))
    made.register_buffer("wide", torch.randn(300, 5).bfloat16(), persistent=False)
    return made


def parameter_returned() -> nn.Module:
    made = body(lambda self, x: (self.a(x), self.kept))
    made.kept = nn.Parameter(torch.randn(5))
    return made


class WithAnArgumentOfThatName(nn.Module):
    """Has arguments with the names of a size, of the file's imports and of its functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, A: Tensor, B: Tensor, jnp: Tensor, clamp: Tensor) -> Tensor:
        rows = self.a(A).reshape(A.shape[0] * 5, 1).reshape(-1, 5)
        return torch.where(rows > 0, B, jnp.exp()) * clamp.clamp(0.1)


def in_a_loop_named_as_the_file(self, x):
    y = x * 2
    for jnp in self.parts:
        x = jnp(x, y)
    return torch.exp(x) * y


class Keys(nn.Module):
    """Takes and returns trees in which two paths read alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, xs: Any, xs_0: Tensor, more: Any) -> Any:
        y = self.a(xs[0]) + xs_0 * xs[1] + more["a-b"] * more["class"]
        return {"out": [y, y * 2], "out_0": y * 3}


def of_keys(self, x):
    found = self.part([x, x * 2], x * 3, {"a-b": x * 5, "class": x * 7})
    return found["out"][0] + found["out"][1] * 5 + found["out_0"] * 7


class OddNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("up-1", nn.Linear(5, 5))
        self.register_parameter("0", nn.Parameter(torch.randn(5)))
        self.register_buffer("b 2", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, "up-1")(x) * getattr(self, "0") + getattr(self, "b 2")


class Layers(nn.Sequential):
    """A list of layers with tensors of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.bias = nn.Parameter(torch.randn(5))
        self.register_buffer("factor", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor + self.bias


class Named(nn.ModuleDict):
    def __init__(self, modules: Any) -> None:
        super().__init__(modules)
        self.register_buffer("factor", torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self["up"](x) * self.factor


class Config:
    def __init__(self, gate: bool) -> None:
        self.gate = gate


class Alike(nn.Module):
    """Has attributes that are a number in one copy and a parameter or a module in another."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.config, self.has_norm = Config(first), not first
        self.a, self.gate = nn.Linear(5, 5), nn.Linear(5, 5)
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.LayerNorm(5) if first else nn.Identity()
        self.scale = nn.Parameter(torch.randn(5)) if first else 0.7
        self.range, self.limit = 1.5 + first, float("inf") * first if first else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.norm(self.a(x))) * self.scale
        if self.config.gate:
            x = torch.sigmoid(x) * x
        if self.has_norm:
            x = torch.tanh(x)
        if self.limit > 0:
            x = torch.cos(x) + 1
        for layer in self.layers:
            x = layer(x)
        return x * self.range


class Scales(nn.Module):
    """Reads one attribute in two branches."""

    def __init__(self, is_first: bool, factor: float) -> None:
        super().__init__()
        self.a, self.is_first, self.factor = nn.Linear(5, 5), is_first, factor

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            return torch.tanh(self.a(x) * self.factor) * 3.3
        return torch.sigmoid(self.a(x)) + self.factor


def tied() -> nn.Module:
    """Return a module whose layers share weights and have biases of their own, and the reverse."""
    made = body(lambda self, ids: self.c(self.b(self.a(self.part(ids)))), part=nn.Embedding(5, 5))
    made.b, made.c = nn.Linear(5, 5), nn.Linear(5, 5)
    made.a.weight, made.c.bias = made.part.weight, made.b.bias
    return made


def with_factor(x, y):
    rows, _ = x.shape
    return x.reshape(rows, 5, 2).transpose(1, 2).reshape(rows, -1) * y


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)

    def forward(self, x: Tensor, more: Any) -> Tensor:
        return sum(more, self.a(x))


def reads_parameters(self, x):
    return x * self.part[0] + self.part[1]


def shared_list() -> nn.Module:
    made = body(looped)
    made.parts = nn.ModuleList([made.a, made.a, nn.Linear(5, 5)])
    return made


def buffers() -> nn.Module:
    made = body(
        lambda self, x: self.a(x).masked_fill(self.mask, 0.5)[:, self.order] + self.table[0, :3]
    )
    made.register_buffer("mask", torch.tensor([True, False, True, True, False]))
    made.register_buffer("order", torch.tensor([0, 2, 1]))
    made.register_buffer("table", torch.randn(20, 10), persistent=False)
    return made


def large_constant() -> nn.Module:
    made = body(lambda self, x: self.a(x) * self.constant + self.kept["table"].mean(0))
    made.constant, made.kept = nn.Parameter(torch.randn(5)), {"table": torch.randn(40, 5)}
    return made


class Sized(nn.Module):
    """A parameter and an argument of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor, size: int) -> Tensor:
        return (x * self.size)[:, :size].sum(1, keepdim=True)


class Row(NamedTuple):
    module: Callable[[], nn.Module]
    inputs: Any = (X,)
    dynamic: Any = None


def attention(weights: bool) -> Callable[..., Any]:
    return lambda self, x: self.part(x, x, x) if weights else self.part(x, x, x)[0]


ROWS = {
    "a named tuple": Row(lambda: body(lambda self, x: Both(self.a(x), x.tanh()))),
    "an input that is not used": Row(
        lambda: body(lambda self, x, mask: self.a(x)), {"x": X, "mask": X}
    ),
    "an input that is left out": Row(Optional, {"x": X}),
    "an input that is returned": Row(lambda: body(lambda self, x: (self.a(x), x))),
    "a tuple and a dict of inputs": Row(
        lambda: body(lambda self, x, pair, more: self.a(pair[0]) + pair[1] * more["b"] + x),
        (X, (X, X + 1), {"a": X, "b": X * 2}),
    ),
    "a keyword": Row(
        lambda: body(lambda self, x, *, scale: self.a(x) * scale), {"x": X, "scale": X}
    ),
    "in place": Row(lambda: body(in_place)),
    "detached": Row(lambda: body(lambda self, x: self.a(x) * self.a(x).detach())),
    "without a gradient": Row(lambda: body(without_gradient)),
    "a scalar": Row(lambda: body(lambda self, x: (self.a(x) ** 2).mean())),
    "residuals": Row(lambda: body(residuals)),
    "a module that only holds another": Row(lambda: body(scaled, part=Holds())),
    "a conjunction with True": Row(lambda: body(lowest_bits)),
    "names that the file uses": Row(lambda: body(names_of_the_file)),
    "an LSTM with its states": Row(lambda: body(states, part=nn.LSTM(5, 5, batch_first=True))),
    "a GRU without its state": Row(
        lambda: body(lambda self, x: self.part(x[None])[0], part=nn.GRU(5, 5))
    ),
    "multi-head attention": Row(
        lambda: body(attention(False), part=nn.MultiheadAttention(6, 2, batch_first=True)),
        (SEQUENCE,),
    ),
    "multi-head attention with weights": Row(
        lambda: body(attention(True), part=nn.MultiheadAttention(6, 2, batch_first=True)),
        (SEQUENCE,),
    ),
    "an encoder": Row(
        lambda: body(
            lambda self, x: self.part(x),
            part=nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2),
        ),
        (SEQUENCE,),
    ),
    "a dict of modules": Row(
        lambda: body(
            lambda self, x: self.part["0"](self.part["up"](x).relu()),
            part=nn.ModuleDict({"up": nn.Linear(5, 7), "0": nn.Linear(7, 5)}),
        )
    ),
    "a list of parameters": Row(
        lambda: body(reads_parameters, part=nn.ParameterList([torch.randn(5), torch.randn(5)]))
    ),
    "a list that repeats a module": Row(shared_list),
    "a list that begins with another class": Row(
        lambda: body(
            looped, parts=nn.ModuleList([nn.Linear(5, 5), *(block(torch.tanh) for _ in range(3))])
        )
    ),
    "a list that ends with another class": Row(
        lambda: body(
            looped, parts=nn.ModuleList([*(block(torch.tanh) for _ in range(3)), nn.Linear(5, 5)])
        )
    ),
    "a list whose modules are given two things": Row(
        lambda: body(with_two_gates, parts=nn.ModuleList([Gated() for _ in range(5)]))
    ),
    "a sequence that is also read by index": Row(
        lambda: body(
            lambda self, x: self.part(x) + self.part[0](x)[:, :5],
            part=nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Dropout(0.1), nn.Linear(7, 5)),
        )
    ),
    "padding ids": Row(
        lambda: body(lambda self, ids: self.part(ids), part=nn.Embedding(9, 5, padding_idx=0)),
        (torch.tensor([[0, 3, 5], [1, 2, 0]]),),
    ),
    "a batch norm": Row(lambda: body(lambda self, x: self.part(self.a(x)), part=nn.BatchNorm1d(5))),
    "an RMS norm": Row(lambda: body(lambda self, x: self.part(self.a(x)), part=nn.RMSNorm(5))),
    "buffers of every kind": Row(buffers),
    "a parameter with the name of a large constant": Row(large_constant),
    "a parameter with the name of a number": Row(
        lambda: body(lambda self, x: self.p(self.a(x), 2) + self.q(x, 3), p=Sized(), q=Sized())
    ),
    "a call that is read after its argument changes": Row(
        lambda: body(called_before_its_argument_changes)
    ),
    "a helper that has names of its caller": Row(lambda: body(with_a_helper_that_has_its_names)),
    "a hook": Row(hooked),
    "a hook that only looks": Row(watched),
    "a forward of its own": Row(patched),
    "a weight made in each call": Row(weight_normed),
    "zeros of both signs": Row(
        lambda: body(
            lambda self, x: (
                torch.copysign(self.a(x), torch.tensor([-0.0]))
                + torch.copysign(x, torch.tensor([0.0]))
            )
        )
    ),
    "numbers that need words": Row(special_numbers),
    "state of other dtypes": Row(state_of_other_dtypes),
    "a parameter that is returned": Row(parameter_returned),
    "a dict of parameters": Row(
        lambda: body(
            lambda self, x: self.a(x) * self.part["up-1"] + self.part["0"],
            part=nn.ParameterDict({"up-1": torch.randn(5), "0": torch.randn(5)}),
        )
    ),
    "a convolution without a batch": Row(
        lambda: body(lambda self, x: self.part(self.a(x)), part=nn.Conv1d(3, 3, 3, padding=1))
    ),
    "a list of layers with a kernel": Row(
        lambda: body(
            lambda self, x: self.part[1](self.part[0](x)),
            part=nn.ModuleList([nn.Linear(5, 5), nn.Conv1d(3, 3, 1)]),
        )
    ),
    "arguments with names of the file": Row(
        lambda: body(
            lambda self, x: self.part(self.a(x), x * 2, x * 3, x + 1),
            part=WithAnArgumentOfThatName(),
        ),
        dynamic={"x": {0: "B"}},
    ),
    "an argument with the name of another file's function": Row(
        lambda: body(lambda self, x, turned: self.a(x) * turned + turned_twice(x)), (X, X + 1)
    ),
    "a loop with a name of the file": Row(
        lambda: body(in_a_loop_named_as_the_file, parts=nn.ModuleList([Gated(), Gated()]))
    ),
    "trees of which two paths read alike": Row(lambda: body(of_keys, part=Keys())),
    "inputs of which two paths read alike": Row(
        Keys, ([X, X * 2], X * 3, {"a-b": X * 5, "class": X * 7})
    ),
    "any number of inputs": Row(lambda: body(lambda self, *xs: self.a(xs[0]) * xs[1]), (X, X + 1)),
    "names that are none of Python": Row(OddNames),
    "a sequence with tensors of its own": Row(lambda: Layers(nn.Linear(5, 7), nn.Linear(7, 5))),
    "a sequence in another with tensors of its own": Row(
        lambda: body(
            lambda self, x: self.part(self.a(x)), part=Layers(nn.Linear(5, 7), nn.Linear(7, 5))
        )
    ),
    "a dict with tensors of its own": Row(
        lambda: body(lambda self, x: self.part(self.a(x)), part=Named({"up": nn.Linear(5, 5)}))
    ),
    "copies whose attributes are of several kinds": Row(
        lambda: body(lambda self, x: self.q(self.p(x)), p=Alike(True), q=Alike(False))
    ),
    "an attribute that two branches read": Row(
        lambda: body(
            lambda self, x: self.r(self.q(self.p(x))),
            p=Scales(True, 0.3),
            q=Scales(False, 0.7),
            r=Scales(True, 0.9),
        )
    ),
    "tied weights and tied biases": Row(tied, (torch.tensor([[0, 3, 4]]),)),
    "a function that names a size twice": Row(
        lambda: body(
            lambda self, x: (
                with_factor(self.part(x), x.repeat(1, 2))
                + with_factor(self.part(x + 1), x.repeat(1, 2))
            ),
            part=nn.Linear(5, 10),
        ),
        {"x": X},
        {"x": {0: "B"}},
    ),
    "an empty list": Row(Sum, {"x": X, "more": []}),
    "two classes of one name": Row(
        lambda: body(
            lambda self, x: self.p(x) + self.q(x), p=block(torch.tanh), q=block(torch.sigmoid)
        )
    ),
}
_FAST = (
    "residuals",
    "without a gradient",
    "a call that is read after its argument changes",
    "a helper that has names of its caller",
    "a hook",
    "an attribute that two branches read",
    "arguments with names of the file",
    "copies whose attributes are of several kinds",
    "two classes of one name",
    "a list whose modules are given two things",
)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _FAST else pytest.mark.slow) for name in ROWS]
)
def test_outputs_are_those_of_torch(name):
    torch.manual_seed(0)
    reference = ROWS[name].module().eval()
    inputs = ROWS[name].inputs
    translation = translate(reference, inputs, dynamic=ROWS[name].dynamic)
    port = loaded(translation, reference)
    arrays = torch.utils._pytree.tree_map(lambda tensor: tensor.numpy(), inputs)
    args, kwargs = ((), arrays) if isinstance(arrays, dict) else (arrays, {})
    with torch.no_grad():
        expected = called(
            reference,
            *(inputs if isinstance(inputs, tuple) else ()),
            **(inputs if isinstance(inputs, dict) else {}),
        )
    got = called(port, *args, **kwargs)
    expected, got = (each if isinstance(each, dict) else {"": each} for each in (expected, got))
    assert list(got) == list(expected)
    for key, value in expected.items():
        # A few operations on numbers about 1, each of which rounds by at most 2⁻²⁴.
        assert np.abs(np.asarray(got[key]) - value.detach().numpy()).max() < 64 * 2**-24, key


@pytest.mark.slow
def test_a_module_called_in_two_ways_is_refused():
    reference = body(lambda self, x: self.part(x) + self.part(x, x), part=Optional())
    with pytest.raises(TranslationError) as refusal:
        translate(reference, (X,))
    assert [(problem.kind, problem.operator) for problem in refusal.value.problems] == [
        ("module", "part")
    ]


REFUSED = {
    "an argument with a name of the file": Row(
        lambda: body(lambda self, x, jnp: self.a(x) * jnp), (X, X)
    ),
    "a size with a word of Python": Row(
        lambda: body(lambda self, x: self.a(x)), {"x": X}, {"x": {0: "for"}}
    ),
    "integers of more than 32 bits": Row(
        lambda: body(lambda self, x: self.a(x) * (torch.tensor([2**40 + 3]) % 7))
    ),
}
_KINDS = ("input", "size", "buffer")


@pytest.mark.parametrize(("name", "kind"), [*zip(REFUSED, _KINDS, strict=True)])
def test_what_no_file_can_say_is_refused(name, kind):
    row = REFUSED[name]
    with pytest.raises(TranslationError) as refusal:
        translate(row.module(), row.inputs, dynamic=row.dynamic)
    assert [problem.kind for problem in refusal.value.problems] == [kind]
