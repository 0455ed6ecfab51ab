"""Who is measured: one row an implementation. No framework: builders are named, not imported."""

from dataclasses import dataclass, field

from jax_attn.bench.record import Workload
from jax_attn.parity.environment import install_line, present

TORCH, JAX = "torch", "jax"
REFERENCE = "sdpa"  # whose own error the others' is compared with


@dataclass(frozen=True)
class Implementation:
    """core, layer: the builder for each kind of workload, "module:function"; "" where none.

    options: given to the builder. needs: modules that must be there. install: what brings
    them. environment: variables that must be set before they are imported.
    """

    name: str
    framework: str
    core: str = ""
    layer: str = ""
    options: dict = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    install: str = ""
    environment: dict = field(default_factory=dict)

    def builder(self, workload: Workload) -> str:
        return self.layer if workload.layer else self.core

    def lacks(self, workload: Workload) -> str:
        """Why it has no program for this kind of workload; "" where it has one."""
        what = "has no layer" if workload.layer else "has no attention alone"
        return "" if self.builder(workload) else what

    @property
    def absent(self) -> str:
        """Which of its modules are not here and what installs them; "" where all are."""
        missing = [module for module in self.needs if not present(module)]
        if not missing:
            return ""
        line = self.install or install_line("bench")
        return f"{', '.join(missing)} not installed: {line}"


_TORCH, _JAX = "jax_attn.bench.torch_programs", "jax_attn.bench.jax_programs"


def _on_torch(name: str, core: str, layer: str, **more) -> Implementation:
    core = core and f"{_TORCH}:{core}"
    return Implementation(name, TORCH, core, f"{_TORCH}:{layer}", **more)


def _on_jax(name: str, core: str, layer: str, **more) -> Implementation:
    core = core and f"{_JAX}:{core}"
    return Implementation(name, JAX, core, f"{_JAX}:{layer}", **more)


def _ours(kernel: str | None) -> Implementation:
    name = f"jax-attn {kernel}" if kernel else "jax-attn"
    return _on_jax(name, "ours_core", "ours_layer", options={"implementation": kernel})


_ALL = (
    _on_torch("sdpa", "sdpa_core", "sdpa_layer"),
    _on_torch("torch eager", "eager_core", "eager_layer"),
    _on_torch("nn.MultiheadAttention", "", "torch_mha_layer"),
    _on_torch(
        "torch.compile",
        "compiled_core",
        "compiled_layer",
        # In its own process: helpers would outlive the compilation, and wait beside the others.
        environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"},
    ),
    Implementation(
        "torchax",
        JAX,
        "jax_attn.bench.torchax_programs:core",
        "jax_attn.bench.torchax_programs:layer",
        needs=("torchax",),
        install="pip install torchax",
    ),
    _on_jax("jax.nn", "jax_nn_core", "jax_nn_layer"),
    _on_jax("flax nnx", "flax_core", "flax_layer"),
    _on_jax("equinox", "", "equinox_layer", needs=("equinox",)),
    _on_jax(
        "keras",
        "keras_core",
        "keras_layer",
        needs=("keras",),
        environment={"KERAS_BACKEND": "jax"},
    ),
    _ours("dense"),
    _ours("blocked"),
    _ours(None),
)

IMPLEMENTATIONS = {implementation.name: implementation for implementation in _ALL}
