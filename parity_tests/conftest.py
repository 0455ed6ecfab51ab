"""Settings for the whole suite; they must be made before jax and torch start."""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each worker has one core's worth: threads that wait for one another cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent
NEEDS_TORCH = re.compile(
    r"^\s*(import torch|from torch|from jax_attn\.parity\.(matrix\.(designs|run_rows|row)|checking"
    r"|run\.reference|checkpoint|bugs\.catalogue|training)|from jax_attn\.parity(\.\w+)? import"
    r"|from helpers\.small_model)",
    re.MULTILINE,
)

# Where torch is absent, what compares with it cannot be collected; the header says what that is.
collect_ignore = (
    [
        str(p.relative_to(HERE))
        for p in sorted(HERE.glob("**/test_*.py"))
        if NEEDS_TORCH.search(p.read_text())
    ]
    if importlib.util.find_spec("torch") is None
    else []
)


@pytest.fixture(autouse=True)
def settings_left_as_found():
    """What one test sets for its whole process would decide what the next one sees."""
    before = process_wide()
    yield
    after = process_wide()
    changed = {name: (x, after[name]) for name, x in before.items() if after[name] != x}
    assert changed == {}, "(before, after)"


def process_wide() -> dict[str, object]:
    """Those of jax, and of torch where it is loaded, that change numbers or threads."""
    import jax

    found: dict[str, object] = dict(jax.config.values)
    if torch := sys.modules.get("torch"):
        found["torch default dtype"] = torch.get_default_dtype()
        found["torch matmul precision"] = torch.get_float32_matmul_precision()
        found["torch threads"] = torch.get_num_threads()
    return found


@pytest.fixture
def compiled_alone(monkeypatch):
    """`verify` runs a layer compiled and not op by op, where each op would compile by itself."""
    monkeypatch.setattr("jax_attn.parity.checkpoint.layer.TRANSFORMS_OF_LAYERS", ("jit",))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="200 drawn examples a test, not 8; etc.")


def quick_to_compile() -> list[str]:
    """XLA's flags for tests; `verify` and --long take the programs that users get."""
    flags = ["--xla_backend_optimization_level=0"]
    # jaxlib 0.10's older code generator takes half the time to compile or less. Later ones have but
    # one, and end a process that names this flag.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags


def pytest_configure(config: pytest.Config) -> None:
    # Much of the suite's time would be compiling: what one test compiled, the others find. Each
    # worker has its own, as JAX's cache does not keep two processes apart.
    cache = tempfile.mkdtemp()
    config.add_cleanup(functools.partial(shutil.rmtree, cache, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    if not config.getoption("--long"):
        os.environ.setdefault("XLA_FLAGS", " ".join(quick_to_compile()))

    from hypothesis import settings

    settings.register_profile("usual", max_examples=8, deadline=None, derandomize=True)
    settings.register_profile("long", settings.get_profile("usual"), max_examples=200)
    settings.load_profile("long" if config.getoption("--long") else "usual")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if in_dtypes := getattr(metafunc.function, "in_dtypes", None):  # dtype_rows.py
        metafunc.parametrize(*in_dtypes(metafunc.config.getoption("--long")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A file to a worker: what one of its tests compiled, the next one finds."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [f"torch is absent; not run: {', '.join(collect_ignore)}"] if collect_ignore else []
