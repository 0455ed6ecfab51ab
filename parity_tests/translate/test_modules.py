"""Small modules of every shape: the written file computes what torch computes."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers.odd_modules import (
    Alike,
    Keys,
    Layers,
    Named,
    OddNames,
    Row,
    Scales,
    Sized,
    Sum,
    WithAnArgumentOfThatName,
    attention,
    buffers,
    hooked,
    in_a_loop_named_as_the_file,
    large_constant,
    of_keys,
    parameter_returned,
    patched,
    reads_parameters,
    shared_list,
    special_numbers,
    state_of_other_dtypes,
    tied,
    watched,
    weight_normed,
    with_factor,
)
from helpers.small_modules import turned_twice
from helpers.written_bodies import (
    SEQUENCE,
    Both,
    Gated,
    Holds,
    Optional,
    X,
    block,
    body,
    called_before_its_argument_changes,
    in_place,
    looped,
    lowest_bits,
    names_of_the_file,
    residuals,
    scaled,
    states,
    with_a_helper_that_has_its_names,
    with_two_gates,
    without_gradient,
)
from jax_attn.translate import translate
from jax_attn.translate.outputs import called
from jax_attn.translate.proof import loaded
from jax_attn.translate.tracing.problems import TranslationError

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
