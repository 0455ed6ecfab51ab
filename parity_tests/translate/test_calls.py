"""The tree of calls: what each module ran, and what it was given, by the names of forward."""

import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx import Node

from helpers.traced_trees import X, calls, tree
from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.source.frames import frames


class Linear(nn.Module):
    """A module with a parameter and a name for its argument."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, tokens):
        return tokens @ self.weight


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Linear()
        self.alias = self.inner

    def forward(self, x):
        return self.alias(self.inner(x) + 1) * self.inner(x)


def test_module_called_twice_is_two_calls_of_one_path():
    found = tree(Twice(), X)
    first, second, third = calls(found.root)
    assert [each.path for each in (first, second, third)] == ["inner"] * 3
    assert [list(each.given) for each in (first, second, third)] == [["tokens"]] * 3
    assert first.results != second.results
    # The addition is the reference's own, between the calls.
    assert second.given["tokens"] in found.root.steps
    assert set(found.state.values()) == {"inner.weight"}


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.mask = torch.arange(5.0)

    def forward(self, ids):
        return self.head(self.embed(ids) * self.scale + self.mask * torch.tensor([3.0]))


@pytest.mark.slow
def test_ties_buffers_and_constants():
    found = tree(Tied(), torch.arange(6).view(2, 3))
    assert {"embed.weight", "scale"} == set(found.state.values()) - set(found.constants)
    constants = sorted(value.numel() for value in found.constants.values())
    assert constants == [1, 5]
    embed, head = calls(found.root)
    assert list(embed.state.values()) == ["embed.weight"]
    assert list(head.state.values()) == ["embed.weight"]
    assert list(head.given) == ["input", "embed_weight"]


class ReadsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 5)

    def forward(self, x):
        return nn.functional.linear(x, self.proj.weight) + self.proj.forward(x)


def test_parent_reads_the_parameters_of_a_child():
    found = tree(ReadsChild(), X)
    assert list(calls(found.root)) == []
    assert set(found.root.state.values()) == {"proj.weight", "proj.bias"}


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None


class Trees(nn.Module):
    class Inner(nn.Module):
        def forward(self, states, masks, *, scale=2.0, offset=None, **options):
            first, second = states
            return Pair(first * scale + masks["full"] + options["extra"], second), states[0], None

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x, pair):
        masks = {"unused": x, "full": x > 0}
        one = self.inner((x, x * 2), masks, extra=pair[1], offset=None)
        two = self.inner((one[1], one[0].left), masks, extra=pair[0], scale=3.0)
        return {"sum": one[0].left + two[0].right, "pair": (two[0].left, x), "none": None}


@pytest.mark.slow
def test_arguments_and_results_are_trees():
    found = tree(Trees(), X, (X, X + 1))
    assert list(found.root.given) == ["x", "pair_0", "pair_1"]
    assert set(found.returned) == {"sum", "pair", "none"}
    assert found.returned["none"] is None
    assert found.returned["pair"][1] is found.root.given["x"]
    first, second = calls(found.root)
    names = ["first", "masks_full", "extra"]
    assert [name for name in first.given if name != "second"] == names
    assert [name for name in second.given if name != "second"] == names
    assert first.arguments["offset"] is None
    assert second.arguments["scale"] == 3.0
    assert first.returned[0]["left"] in first.results
    # It returns its own input, which is no result of the call.
    assert first.returned[1] is found.root.given["x"]
    assert first.returned[2] is None


class Silent(nn.Module):
    class Inner(nn.Module):
        def forward(self, buffer, value):
            buffer[:, 1].copy_(value)

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        y = x * 2
        self.inner(y, x[:, 0])
        return y + x


def test_child_that_writes_into_its_parents_tensor():
    reference = Silent()
    found = tree(reference, X)
    (inner,) = calls(found.root)
    assert inner.returned is None
    assert next(iter(inner.given)) == "buffer"
    torch.testing.assert_close(
        found.program.module(check_guards=False)(X), reference(X), rtol=0, atol=0
    )


def helper(x):
    return x.cos() + 1


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Helped(nn.Module):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(5, 5)

        @decorated
        def forward(self, hidden, mask=None):
            return self._inner(helper(hidden))

        def _inner(self, hidden):
            return self.proj(hidden).sin()

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.Layer(), nn.Tanh())

    @decorated
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)


def test_frames_of_helpers():
    found = tree(Helped(), X)
    by_path = {call.path: call for call in calls(found.root)}
    modules = [path for path, call in by_path.items() if call.function is None]
    assert modules == ["layers", "layers.0", "layers.0.proj", "layers.1"]
    assert by_path["helper()"].forward.__name__ == "helper"
    assert list(by_path["helper()"].given) == ["x"]
    layer = by_path["layers.0"]
    assert list(layer.given) == ["hidden"]
    beyond = {
        str(node.target): [frame.function for frame in frames(node)[layer.depth :]]
        for node in layer.nodes()
    }
    assert beyond == {
        "aten.cos.default": ["forward", "helper"],
        "aten.add.Tensor": ["forward", "helper"],
        "aten.linear.default": ["forward", "_inner", "forward"],
        "aten.sin.default": ["forward", "_inner"],
    }
    (node,) = by_path["layers.0.proj"].steps
    assert frames(node)[by_path["layers.0.proj"].depth].file == nn.modules.linear.__file__
    (cos,) = (node for node in layer.nodes() if str(node.target) == "aten.cos.default")
    assert frames(cos)[-1].text == "return x.cos() + 1"
    assert frames(cos)[0].text.startswith("return torch.utils.checkpoint")


@pytest.mark.slow
def test_everything_of_a_module_that_can_be_translated_is_in_the_tree():
    found = tree(Helped(), X)
    operators = [node for node in found.program.graph.nodes if node.op == "call_function"]
    assert list(found.root.nodes()) == operators
    assert all(isinstance(node, Node) for node in found.root.results)


@pytest.mark.slow
def test_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=40,
        vocab_size=97,
        use_cache=False,
    )
    dynamic = {"input_ids": {0: "B", 1: "T"}, "attention_mask": {0: "B", 1: "T"}}
    ids, mask = torch.randint(0, 97, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    found = tree(
        transformers.LlamaModel(config), dynamic=dynamic, input_ids=ids, attention_mask=mask
    )
    assert list(found.root.given) == list(dynamic)
    assert sorted(set(found.sizes.names.values())) == ["B", "T"]
    assert not found.sizes.limits
    assert list(found.returned) == ["last_hidden_state"]
    by_path = {call.path: call for call in calls(found.root)}
    assert set(by_path["layers.0.self_attn"].given) == {
        "hidden_states",
        "attention_mask",
        "cos",
        "sin",
    }
    assert list(by_path["layers.0.self_attn.q_proj"].given) == ["input"]
    assert len(by_path["rotary_emb"].results) == 2
    attention = by_path["layers.0.self_attn"]
    helpers = {
        frame.function
        for node in attention.steps
        if isinstance(node, Node)
        for frame in frames(node)[attention.depth + 1 :]
    }
    assert "apply_rotary_pos_emb" in helpers
    functions = [step.function for step in attention.steps if isinstance(step, ModuleCall)]
    assert [each.__name__ for each in functions if each].count("rotate_half") == 2


@pytest.mark.slow
def test_t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=24,
        d_kv=8,
        d_ff=40,
        num_layers=1,
        num_heads=3,
        vocab_size=97,
        use_cache=False,
    )
    reference = transformers.T5Model(config)
    ids = torch.randint(3, 97, (2, 11))
    found = tree(reference, input_ids=ids, decoder_input_ids=ids[:, :7])
    by_path = {call.path: call for call in calls(found.root)}
    for side in ("encoder", "decoder"):
        tokens = by_path[f"{side}.embed_tokens"]
        assert list(tokens.state.values()) == ["shared.weight"]
    cross = by_path["decoder.block.0.layer.1.EncDecAttention"]
    assert list(cross.given)[:2] == ["hidden_states", "mask"]
    assert cross.given["key_value_states"] in by_path["encoder"].results
