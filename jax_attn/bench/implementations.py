"""All that the bench can time, a row each. Builders are named, not imported."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jax_attn.bench.workload import CACHED, PAIR_MODES, STEP, PairWorkload, Workload
from jax_attn.environment import install_line, present

TORCH, JAX = "torch", "jax"
REFERENCE = "sdpa"  # the errors of the others are compared with its error
OURS = "jax-attn"  # with the kernel that it chooses; the name of a forced kernel follows it
EAGER = "torch eager"  # with its times those of a pair are compared
JITTED = "jax.jit"


@dataclass(frozen=True)
class Implementation:
    """One implementation of a workload, or one way to run a pair, or both, and its builders.

    core, layer, cached: "module:function", the builder for attention without projections, for a
    layer and for attention with a cache; "" if it has none. pair: the one for a side of a pair.
    options: passed to the builder. needs: modules that must be installed. install: the command that
    installs them. environment: variables to set before they are imported. devices: the devices on
    which it is measured by default. modes: those of a pair for which it makes a difference.
    """

    name: str
    framework: str
    core: str = ""
    layer: str = ""
    cached: str = ""
    pair: str = ""
    options: dict[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    install: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "gpu")
    modes: tuple[str, ...] = (*PAIR_MODES, *CACHED)

    def builder(self, workload: Workload | PairWorkload) -> str:
        return self._kind(workload)[1]

    def lacks(self, workload: Workload | PairWorkload) -> str:
        """Return why it has no program for this kind of workload, or "" if it has one."""
        kind, builder = self._kind(workload)
        return "" if builder else f"has no program for {kind}"

    def _kind(self, workload: Workload | PairWorkload) -> tuple[str, str]:
        """Return the kind of workload in words, and the builder for it."""
        if isinstance(workload, PairWorkload):
            return "a pair", self.pair
        if workload.layer:
            return "a layer", self.layer
        if workload.room:
            return "attention with a cache", self.cached
        return "attention without projections", self.core

    @property
    def absent(self) -> str:
        """The modules that are not installed and what installs them; "" if none is missing."""
        missing = [module for module in self.needs if not present(module)]
        if not missing:
            return ""
        line = self.install or install_line("bench")
        return f"{', '.join(missing)} not installed: {line}"


def _in(
    framework: str, name: str, core: str = "", layer: str = "", cached: str = "", **fields: Any
) -> Implementation:
    """Return an implementation whose builders are in this package's module for that framework."""
    start = f"jax_attn.bench.programs.{framework}_programs:"
    core, layer, cached = (builder and start + builder for builder in (core, layer, cached))
    if pair := fields.pop("pair", ""):
        fields["pair"] = f"jax_attn.bench.programs.{framework}_pair:{pair}"
    return Implementation(name, framework, core, layer, cached, **fields)


_on_torch, _on_jax = partial(_in, TORCH), partial(_in, JAX)
# Compile in the worker's own process: helper processes would outlive the compilation.
_IN_ITS_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _forced(kernel: str) -> Implementation:
    """Return torch's fused attention, restricted to one of its backends."""
    options = {"backend": f"{kernel.upper()}_ATTENTION"}
    return _on_torch(f"sdpa {kernel}", "sdpa_core", options=options, devices=("gpu",))


_ALL = (
    _on_torch("sdpa", "sdpa_core", "sdpa_layer", "sdpa_cached"),
    *map(_forced, ("flash", "cudnn", "efficient")),
    _on_torch(
        "flash-attn",
        "flash_attn_core",
        needs=("flash_attn",),
        install="pip install flash-attn --no-build-isolation",
        devices=("gpu",),
    ),
    _on_torch(EAGER, "eager_core", "eager_layer", "eager_cached", pair="eager"),
    _on_torch("nn.MultiheadAttention", "", "torch_mha_layer"),
    _on_torch(
        "torch.compile",
        "compiled_core",
        "compiled_layer",
        pair="compiled",
        environment=_IN_ITS_PROCESS,
    ),
    _on_torch(
        "torch.compile reduce-overhead",
        pair="reducing_overhead",
        devices=("gpu",),  # it uses CUDA graphs; elsewhere it equals torch.compile
        environment=_IN_ITS_PROCESS,
    ),
    _on_jax(JITTED, pair="jitted"),
    _on_jax("jax.jit donated", pair="donated", modes=(STEP,)),
    Implementation(
        "torchax",
        JAX,
        "jax_attn.bench.programs.torchax_programs:core",
        "jax_attn.bench.programs.torchax_programs:layer",
        needs=("torchax",),
        install="pip install torchax",
    ),
    _on_jax("jax.nn", "jax_nn_core", "jax_nn_layer", "jax_nn_cached"),
    _on_jax("flax nnx", "flax_core", "flax_layer"),
    _on_jax("equinox", "", "equinox_layer", needs=("equinox",)),
    _on_jax(
        "keras", "keras_core", "keras_layer", needs=("keras",), environment={"KERAS_BACKEND": "jax"}
    ),
    *(
        _on_jax(f"jax-attn {kernel}", "ours_core", "ours_layer", options={"implementation": kernel})
        for kernel in ("dense", "blocked")
    ),
    _on_jax("jax-attn", "ours_core", "ours_layer", "ours_cached"),
)

IMPLEMENTATIONS = {implementation.name: implementation for implementation in _ALL}
WAYS = tuple(name for name, row in IMPLEMENTATIONS.items() if row.pair)
"""The ways to run a pair."""
OF_PRESETS = tuple(n for n, row in IMPLEMENTATIONS.items() if row.core or row.layer or row.cached)
"""The implementations of the workloads of presets."""


def by_default(names: tuple[str, ...], device: str) -> tuple[str, ...]:
    """Return those of these names that are measured by default on a device, "cpu" or "gpu"."""
    return tuple(name for name in names if device in IMPLEMENTATIONS[name].devices)
