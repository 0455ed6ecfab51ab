"""Choice of a kernel for the platform at hand, with the reasons against the others."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jax_attn.attention import checks, meshes
from jax_attn.attention.call import Call
from jax_attn.attention.kernels import blocked, by_platform, cudnn, dense, splash
from jax_attn.attention.kernels.mesh import explicit
from jax_attn.attention.kernels.mesh.shards import OUTPUT

# As jax.export spells them. Any other platform gets the kernels without `only_on`.
PLATFORMS = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A way to compute attention; `implementation=` takes its name or this record.

    name: its name in messages. run: Call → (B, T, N, Hv). refusals: Call, its arrays maybe abstract
    → every reason why run cannot serve it. drawbacks: Call, platform → reasons to prefer another
    kernel there. why: what it offers, shown when it is chosen. only_on: the only platform it
    supports, if there is one. check_vma: whether it runs inside a shard_map with check_vma=True.
    """

    name: str
    run: Callable[[Call], jax.Array]
    refusals: Callable[[Call], list[str]]
    drawbacks: Callable[[Call, str], list[str]]
    why: str
    only_on: str | None = None
    check_vma: bool = True

    def __repr__(self) -> str:
        """Return the name's repr, so that messages read alike for a name and for a record."""
        return repr(self.name)


# Values of `implementation=`: None, the name of a kernel in the table, or any Kernel.
Implementation = str | Kernel | None


def no_reasons(*_: object) -> list[str]:
    """Return no reasons: for kernels that refuse no call or have no drawback."""
    return []


# In the order in which they are tried.
_IN_ORDER = (
    Kernel(
        "cudnn",
        cudnn.attention,
        refusals=cudnn.refusals,
        drawbacks=no_reasons,
        why="is NVIDIA's own, fused; no forward mode (jvp); jax.export asks to allow its calls",
        only_on="cuda",
    ),
    Kernel(
        "splash",
        splash.attention,
        refusals=splash.refusals,
        drawbacks=splash.drawbacks,
        why="is Pallas's own for TPUs, block-sparse; no forward mode (jvp)",
        only_on="tpu",
        check_vma=False,
    ),
    Kernel(
        "blocked",
        blocked.attention,
        refusals=blocked.refusals,
        drawbacks=blocked.drawbacks,
        why="works tile by tile and holds no T×S array; forward mode (jvp) is dense's",
    ),
    Kernel(
        "dense",
        dense.attention,
        refusals=no_reasons,
        drawbacks=no_reasons,
        why="writes every score out and serves any call",
    ),
)
KERNELS: Mapping[str, Kernel] = {kernel.name: kernel for kernel in _IN_ORDER}


@dataclasses.dataclass(frozen=True, repr=False)
class KernelExplanation:
    """The kernel that would run, and the reasons against the others.

    Attributes:
      platform: the platform that this is about; the outermost explanation is about this process's
        own.
      chosen: the kernel's name; None if the requested kernel cannot serve the call.
      why: the reason for the choice.
      refusals: every reason against each kernel that is not chosen.
      elsewhere: the explanations for the other platforms, for which a program that is traced here
        may be compiled.
    """

    platform: str
    chosen: str | None
    why: str
    refusals: Mapping[str, tuple[str, ...]]
    elsewhere: tuple["KernelExplanation", ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.chosen or 'nothing'} runs: {self.why}"]
        for name, reasons in self.refusals.items():
            lines += [f"  not {name}: {reason}" for reason in reasons]
        for other in self.elsewhere:
            lines.append(f"on {other.platform}, {other}")
        return "\n".join(lines)

    __repr__ = __str__


def implementation_problems(implementation: object) -> list[str]:
    """Say why `implementation` names no kernel."""
    is_known = isinstance(implementation, str) and implementation in KERNELS
    if implementation is None or isinstance(implementation, Kernel) or is_known:
        return []
    known = ", ".join(map(repr, KERNELS))
    return [f"implementation: expected None or one of {known}, got {implementation!r}"]


def home(call: Call) -> str:
    """Return the platform of the call's arrays or mesh, else that of JAX's default device."""
    query = call.query
    if isinstance(query, jax.Array) and not isinstance(query, jax.core.Tracer):
        return _named(next(iter(query.devices())).platform)
    device = jax.typeof(query).sharding.mesh.abstract_device
    return home_platform() if device is None else _named(device.platform)


def home_platform() -> str:
    """Return the platform of JAX's default device."""
    device = jax.config.jax_default_device  # type: ignore[attr-defined]  # jax makes it dynamically
    if device is None:
        return _named(jax.default_backend())
    return _named(getattr(device, "platform", device))


def _named(platform: str) -> str:
    return "cuda" if platform == "gpu" else platform


def explain(call: Call, implementation: Implementation) -> KernelExplanation:
    """Explain the choice for the call's own platform, and for the others."""
    if explicit.is_cut(call):
        return _on_part(explain, call, implementation)
    here = home(call)
    elsewhere = (choose(call, implementation, each) for each in PLATFORMS if each != here)
    return dataclasses.replace(choose(call, implementation, here), elsewhere=tuple(elsewhere))


def choose(
    call: Call, implementation: Implementation, platform: str | None = None
) -> KernelExplanation:
    """Choose the required kernel, else the first that can serve the call and has no drawback.

    platform: the call's own if None. In a mesh of Explicit axes the choice is made for one device's
    part of the call.
    """
    if explicit.is_cut(call):
        return _on_part(choose, call, implementation)
    platform = home(call) if platform is None else platform
    kernels, insisted = _candidates(implementation)
    reasons = {name: tuple(kernel.refusals(call)) for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        if kernel.only_on not in (None, platform):
            misplaced = f"it runs on {kernel.only_on}, not on {platform}"
            reasons[name] = (misplaced, *reasons[name])
    if insisted is not None:
        if reasons[insisted]:
            why = f"implementation={insisted!r} is required and cannot serve the call"
            return KernelExplanation(platform, None, why, {insisted: reasons[insisted]})
        chosen, preferred = insisted, f"{insisted} is required"
    else:
        for name, kernel in kernels.items():
            reasons[name] = reasons[name] or tuple(kernel.drawbacks(call, platform))
        chosen = next(name for name in kernels if not reasons[name])
        preferred = f"{chosen} comes first"
    others = {name: why or (preferred,) for name, why in reasons.items() if name != chosen}
    return KernelExplanation(platform, chosen, kernels[chosen].why, others)


def _on_part(ask: Callable, call: Call, implementation: Implementation) -> KernelExplanation:
    """Return what `ask` says of one device's part of a call in a mesh of Explicit axes."""
    explanations: list[KernelExplanation] = []

    def record(part: Call) -> jax.Array:
        explanations.append(ask(part, implementation))
        return part.query

    jax.eval_shape(lambda x: explicit.on_each_device(record, OUTPUT, x, check_vma=False), call)
    return explanations[0]


def run(call: Call, implementation: Implementation) -> jax.Array:
    """Run the chosen kernel; raise ArgumentError if the required one cannot serve the call."""
    choice, (kernels, _) = choose(call, implementation), _candidates(implementation)
    if choice.chosen is None:
        reasons = [reason for each in choice.refusals.values() for reason in each]
        checks.raise_all(f"implementation={implementation!r} cannot serve this call", reasons)
    assert choice.chosen is not None
    call, kernel = call.on_device(), kernels[choice.chosen]
    if explicit.is_cut(call):
        return explicit.on_each_device(kernel.run, OUTPUT, call, check_vma=kernel.check_vma)
    if implementation is not None or not _may_run_elsewhere():
        return kernel.run(call)
    others = [choose(call, None, each) for each in PLATFORMS if each != choice.platform]
    runs = {each.platform: kernels[each.chosen].run for each in others if each.chosen}
    return by_platform.attention(runs | {choice.platform: kernel.run}, choice.platform, call)


def _candidates(implementation: Implementation) -> tuple[Mapping[str, Kernel], str | None]:
    """Return all kernels by name, and the name of the required one."""
    if isinstance(implementation, Kernel):
        return {**KERNELS, implementation.name: implementation}, implementation.name
    return KERNELS, implementation


def _may_run_elsewhere() -> bool:
    """Return whether JAX is tracing, so that the program may be compiled for any platform.

    Return False inside a shard_map: its program is compiled for that mesh's devices, and JAX cannot
    combine branches whose results vary along different axes of the mesh.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer) and not meshes.within_shard_map()
