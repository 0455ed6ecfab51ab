"""The functional graph computes what the module computes, forward and every gradient."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from jax_attn.translate.tracing.export.exported import exported
from jax_attn.translate.tracing.problems import TranslationError

X = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 5)

    def forward(self, x):
        with torch.no_grad():
            scale = self.proj(x) * x
            scale[:, 0] = 2.0
            with torch.enable_grad():
                seen = scale * x
            norm = scale.sum() + seen.sum()
        return x * scale + norm + seen


class DecoratedNoGrad(nn.Module):
    class Inner(nn.Module):
        @torch.no_grad()
        def forward(self, x):
            return x.exp(), x

    def __init__(self):
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x):
        y, same = self.inner(x)
        return y * x + same


class Detached(nn.Module):
    def forward(self, x):
        return x * x.detach() + x.exp().detach()


class Inference(nn.Module):
    @torch.inference_mode()
    def scale(self, x):
        return x.exp()

    def forward(self, x):
        with torch.inference_mode():
            y = x * 2
        return x + y + x * self.scale(x).clone()


class DetachedInPlace(nn.Module):
    def forward(self, x):
        y = x * 2
        z = y * 3
        y.detach_()
        return z + y * x


class StraightThrough(nn.Module):
    def forward(self, x):
        return x + (x.round() - x).detach()


class AddOnView(nn.Module):
    def forward(self, x):
        y = x * 1.0
        row = y[1]
        row.add_(y[0])
        y.mul_(2.0)
        return y * row


class SliceCopy(nn.Module):
    def forward(self, x):
        y = torch.zeros_like(x)
        y[:, 1:3].copy_(x[:, :2] ** 2)
        y[:, 4] = x[:, 0].sin()
        return y * x


class Broadcast(nn.Module):
    def forward(self, x):
        y = torch.ones(3, 2, 5, dtype=torch.float64)
        y[:, 1] = x[0]
        y[:, 0, 2:].copy_(x[:, 2:].float())
        return y * x[:, None]


class IndexPut(nn.Module):
    def forward(self, x):
        y = x.clone()
        y[torch.tensor([0, 2]), torch.tensor([1, 3])] = x[0, :2] * 3
        return y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)


class Scatter(nn.Module):
    def forward(self, x):
        y = torch.zeros_like(x)
        y.view(-1).scatter_(0, torch.tensor([7, 2, 5]), x[:, 1])
        y.masked_fill_(x > 1, -3.0)
        return y * x


class ChildWrites(nn.Module):
    class Child(nn.Module):
        def forward(self, x):
            x[:, 0].mul_(3.0)

    def __init__(self):
        super().__init__()
        self.child = self.Child()

    def forward(self, x):
        y = x * 2
        last = y[:, :2]
        assert self.child(y) is None
        return last.sum() * y


class Unrolled(nn.Module):
    """Writes one row after the other, each of which reads the last."""

    def forward(self, x):
        y = torch.zeros_like(x)
        y[0] = x[0]
        for row in range(1, 3):
            y[row] = y[row - 1].clone() * x[row]
        return y


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(5, 5)

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.proj, x, use_reentrant=False) * x


class NarrowAutocastOff(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = x @ x.T
        with torch.autocast("cuda", dtype=torch.float16):
            return y @ x


MODULES = [
    NoGrad,
    DecoratedNoGrad,
    Detached,
    Inference,
    DetachedInPlace,
    StraightThrough,
    AddOnView,
    SliceCopy,
    Broadcast,
    IndexPut,
    Scatter,
    ChildWrites,
    Unrolled,
    Checkpointed,
    NarrowAutocastOff,
]


def gradients(call, tensors, x):
    """Return what a call returns and its gradient by x and by each of some tensors."""
    x = x.clone().requires_grad_()
    result = call(x)
    weights = torch.linspace(-1.0, 1.5, result.numel(), dtype=result.dtype).view_as(result)
    found = torch.autograd.grad((result * weights).sum(), [x, *tensors], allow_unused=True)
    return [result.detach(), *found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)
def test_graph_has_the_gradients_of_the_module(kind):
    torch.manual_seed(1)
    reference = kind().double()
    export = exported(reference, (X,))
    assert not export.problems
    for node in export.program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable
    module = export.program.module(check_guards=False)
    there = gradients(reference, list(reference.parameters()), X)
    here = gradients(module, list(module.parameters()), X)
    for ours, theirs in zip(here, there, strict=True):
        if theirs is None or ours is None:
            # A gradient that torch does not compute is zero.
            ours, theirs = ([] if each is None else each.tolist() for each in (ours, theirs))
            assert not any(map(any, [*ours, *theirs]))
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


class WriteThroughDetach(nn.Module):
    def forward(self, x):
        y = x * 1.0
        y.detach().mul_(2.0)  # HERE
        return y * y


class WriteUnderNoGrad(nn.Module):
    def forward(self, x):
        y = x * 1.0
        with torch.no_grad():
            y.clamp_(-1.0, 1.0)  # HERE
        return y * y


class Autocast(nn.Module):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.T  # HERE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "word"),
    [(WriteThroughDetach, "alias"), (WriteUnderNoGrad, "alias"), (Autocast, "autocast")],
)
def test_what_no_functional_graph_says_is_told_with_its_line(kind, word):
    (problem,) = exported(kind(), (X.float(),)).problems
    assert (problem.kind, problem.file) == (word, __file__)
    assert "# HERE" in problem.text


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5).eval()
        self.proj = nn.Linear(5, 5)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.count = 0

    def forward(self, x):
        self.calls.add_(1)
        return self.norm(self.proj(x))


@pytest.mark.slow
def test_reference_is_not_changed():
    reference = Stateful()
    reference.proj.weight.grad = torch.ones(5, 5)
    reference.train()
    reference.norm.eval()

    def look():
        return [
            (
                name,
                module.training,
                [*map(id, module._parameters.values()), *map(id, module._buffers.values())],
                {key: len(hooks) for key, hooks in vars(module).items() if "hooks" in key},
                [value for value in vars(module).values() if isinstance(value, int)],
                [(each.grad is None, each.requires_grad) for each in module.parameters()],
            )
            for name, module in reference.named_modules()
        ]

    before, values = look(), {key: x.clone() for key, x in reference.state_dict().items()}
    exported(reference, (X.float(),))
    assert look() == before
    assert all(torch.equal(x, values[key]) for key, x in reference.state_dict().items())
    assert reference.calls == 0


class Branches(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # HERE
            x = x * 2
        if x.max() > 100:  # THERE
            return x
        return -x


def test_refusal_of_export_names_the_line():
    reference = Branches().train()
    with pytest.raises(TranslationError) as caught:
        exported(reference, (X,))
    problem = caught.value.problems[0]
    assert problem.kind == "data-dependent size"
    assert "# HERE" in problem.text
    # A draft goes past the first refusal, and tells of the second.
    (further,) = caught.value.problems[1:]
    assert "# THERE" in further.text
    assert reference.training
    assert not reference._forward_hooks
