"""The tree of calls: what each module ran, and what it was given, by the names of forward."""

import dataclasses
import functools

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.fx import Node

from jax_attn.translate.tracing.calls import ModuleCall
from jax_attn.translate.tracing.export.exported import exported
from jax_attn.translate.tracing.problems import TranslationError, Unsupported
from jax_attn.translate.tracing.source.frames import frames
from jax_attn.translate.tracing.traced import traced
from jax_attn.translate.tracing.unsupported import unsupported

X = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))


def tree(reference, *inputs, dynamic=None, **named):
    return traced(exported(reference, inputs or named, dynamic), reference)


def calls(call):
    """Iterate over the calls below one, in order."""
    for step in call.steps:
        if isinstance(step, ModuleCall):
            yield step
            yield from calls(step)


def kinds(found):
    return [problem.kind for problem in found]


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


# -- sizes


class Attends(nn.Module):
    def forward(self, x, mask):
        batch, length = x.shape[:2]
        scores = x.reshape(batch * length, -1) @ x.new_ones(x.shape[2], length // 2)
        return scores.view(batch, length, -1) * mask[:, :, None]


@pytest.mark.slow
def test_sizes_are_written_in_their_names():
    dynamic = {"x": {0: "B", 1: "T"}, "mask": {0: "B", 1: "T"}}
    found = tree(Attends(), dynamic=dynamic, x=torch.randn(3, 11, 5), mask=torch.ones(3, 11))
    assert sorted(set(found.sizes.names.values())) == ["B", "T"]
    written = {
        found.sizes.written(size) for node in found.root.nodes() for size in node.meta["val"].shape
    }
    assert written == {"B", "T", "B * T", "T // 2", "5", "1"}
    assert not found.sizes.fixed


class Loop(nn.Module):
    def forward(self, x):
        return sum(x[:, step] * step for step in range(x.shape[1]))  # HERE


class Unbound(nn.Module):
    def forward(self, x):
        first, *others = x.unbind(1)  # HERE
        return first + sum(others)


class Square(nn.Module):
    def forward(self, x):
        return x @ x  # HERE


class Long(nn.Module):
    def forward(self, x):
        return x * 2 if x.shape[1] > 6 else x  # HERE


class Rows(nn.Module):
    def forward(self, x):
        return torch.stack([row * 2 for row in x])  # HERE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loop, Unbound, Square, Long, Rows])
def test_size_that_the_export_fixes_is_refused_with_its_line(kind):
    with pytest.raises(TranslationError) as caught:
        tree(kind(), torch.randn(7, 7), dynamic={"x": {0: "B", 1: "T"}})
    (problem,) = caught.value.problems
    assert problem.kind == "size"
    assert "# HERE" in problem.text


class Checked(nn.Module):
    def forward(self, x):
        if x.shape[1] > 40:  # HERE
            raise ValueError("too long")
        return x * 2


class Halves(nn.Module):
    def forward(self, x):
        return x.view(x.shape[0], x.shape[1] // 2, 2)  # HERE


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Checked, Halves])
def test_size_that_torch_itself_refuses_is_told(kind):
    found = tree(kind(), torch.randn(3, 10), dynamic={"x": {0: "B", 1: "T"}})
    assert found.sizes.limits
    assert all("# HERE" in problem.text for problem in found.sizes.limits)


def test_sizes_that_are_wrong_are_told_at_once():
    with pytest.raises(TranslationError) as caught:
        tree(
            Attends(),
            dynamic={"x": {0: "B", 1: "T", 5: "Z"}, "mask": {0: "T"}, "y": {0: "B"}},
            x=torch.randn(1, 11, 5),
            mask=torch.ones(1, 11),
        )
    assert kinds(caught.value.problems) == ["size"] * 4


class Cache:
    pass


class Cached(nn.Module):
    def forward(self, x, past=None):
        return x


def test_cache_as_an_input_is_refused():
    with pytest.raises(TranslationError) as caught:
        tree(Cached(), x=X, past=Cache())
    (problem,) = caught.value.problems
    assert (problem.kind, problem.operator) == ("input", "past")


def test_input_that_forward_does_not_take_is_refused():
    with pytest.raises(TranslationError) as caught:
        tree(Cached(), x=X, future=X)
    assert kinds(caught.value.problems) == ["input"]


# -- what cannot be translated


@pytest.mark.parametrize(
    ("file", "shown"),
    [
        ("/home/me/lib/python3.11/site-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("/usr/lib/python3/dist-packages/timm/layers/mlp.py", "timm/layers/mlp.py"),
        ("/home/me/model.py", "/home/me/model.py"),
    ],
)
def test_a_line_of_an_installed_package_is_told_by_its_module(file, shown):
    problem = Unsupported("size", "x, axis 1", "is fixed", file, 7, "return x")
    assert (problem.source, problem.file) == (shown, file)
    assert str(problem).endswith(f"\n    {shown}:7: return x")


class Untranslatable(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("position", torch.zeros((), dtype=torch.long))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        self.position.add_(1)  # buffer
        positive = x[x > 0]  # data-dependent size
        places = x.nonzero()  # data-dependent size
        noise = nn.functional.dropout(x, 0.1)  # random
        drawn = torch.rand(3)  # random
        kept = self.drop(x) + nn.functional.dropout(x, 0.0)
        found = torch.special.bessel_j0(x)  # operator
        return positive.sum() + places.sum() + noise + drawn[:, None] + kept + found


@pytest.mark.slow
def test_all_that_cannot_be_translated_is_told_with_its_line():
    # What a dropout leaves in eval mode is a clone.
    known = ["aten.sum.default", "aten.add.Tensor", "aten.clone.default"]
    found = unsupported(tree(Untranslatable(), X), known)
    for problem in found:
        assert problem.file == __file__
        if problem.kind != "operator":
            assert problem.text.endswith(f"# {problem.kind}")
    assert kinds(found).count("data-dependent size") == 2
    assert kinds(found).count("random") == 2
    assert kinds(found).count("buffer") == 1
    operators = {problem.operator for problem in found if problem.kind == "operator"}
    assert "aten.special_bessel_j0.default" in operators
    assert "aten.sum.default" not in operators
    assert not any("dropout" in operator for operator in operators)


@pytest.mark.slow
def test_everything_of_a_module_that_can_be_translated_is_in_the_tree():
    found = tree(Helped(), X)
    operators = [node for node in found.program.graph.nodes if node.op == "call_function"]
    assert list(found.root.nodes()) == operators
    assert all(isinstance(node, Node) for node in found.root.results)


# -- models as they are published


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
