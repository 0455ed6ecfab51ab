"""Settings for the whole suite; they must be made before jax and torch start."""

import collections
import functools
import gc
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

# Each worker has one core's worth: threads that wait for one another cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).parent

# Files that import these are skipped by name where torch is not installed, and nowhere else: the
# references, and what checks them beside it.
TORCH = ("torch", "transformers", "equinox", "keras")
TORCH_IS_ABSENT = importlib.util.find_spec("torch") is None


class FileOfTests(pytest.Module):
    """Skipped where importing it needs torch and there is none; any other error stays one."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as error:
            cause = error.__cause__
            missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
            if TORCH_IS_ABSENT and missing in TORCH:
                pytest.skip(f"{self.nodeid} needs {missing}", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return FileOfTests.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def settings_left_as_found():
    """What one test sets for its whole process would decide what the next one sees."""
    before = process_wide()
    yield
    after = process_wide()
    changed = {name: (x, after[name]) for name, x in before.items() if after[name] != x}
    assert changed == {}, "(before, after)"


def process_wide() -> dict[str, object]:
    """Settings of jax, and of torch where it is loaded, that change numbers or threads."""
    import jax

    settings: dict[str, object] = dict(jax.config.values)
    if torch := sys.modules.get("torch"):
        settings["torch default dtype"] = torch.get_default_dtype()
        settings["torch matmul precision"] = torch.get_float32_matmul_precision()
        settings["torch threads"] = torch.get_num_threads()
    return settings


@pytest.fixture
def compiled_alone(monkeypatch):
    """`verify` runs a layer compiled and not op by op, where each op would compile by itself."""
    monkeypatch.setattr("jax_attn.porting.verify.layer.TRANSFORMS_OF_LAYERS", ("jit",))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Small whole models by name, each written once."""
    from helpers.families.whole_models import SmallModel

    @functools.cache
    def written(name: str) -> SmallModel:
        model = SmallModel(name, tmp_path_factory.mktemp("model"))
        assert model.config
        return model

    return written


# Files that take minutes.
WITH_LONG_ALONE = (
    "attack/test_wrong_models.py",
    "models/test_every_gradient.py",
)


# What needs an NVIDIA GPU.
WITH_GPU_ALONE = ("parity_tests/on_gpu",)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_long = collection_path.as_posix().endswith(WITH_LONG_ALONE)
    is_on_gpu = collection_path.as_posix().endswith(WITH_GPU_ALONE)
    left_out = is_long and not config.getoption("--long")
    return True if left_out or (is_on_gpu and not config.getoption("--gpu")) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="200 drawn examples a test, not 8; etc.")
    parser.addoption(
        "--slow-since",
        metavar="REVISION",
        help="all but the slow tests of rooms that are as they were in a git revision",
    )
    parser.addoption("--gpu", action="store_true", help="on a GPU, with the tests that need one")


def quick_to_compile() -> list[str]:
    """XLA's flags for tests; `verify` and --long take the programs that users get."""
    # A program is not compiled in parts, for threads that a worker with one core has not.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # jaxlib 0.10's older code generator takes half the time to compile or less. Later ones have but
    # one, and end a process that names this flag.
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return flags


def pytest_configure(config: pytest.Config) -> None:
    # Much of the suite's time is compilation: tests share what one of them compiled. Each worker
    # has a cache of its own: JAX writes a program under its final name, and another process would
    # read what is half written.
    cache = tempfile.mkdtemp()
    config.add_cleanup(functools.partial(shutil.rmtree, cache, ignore_errors=True))
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    # Eight devices for tests of meshes; all others run on the first.
    flags = ["--xla_force_host_platform_device_count=8"]
    on_gpu = config.getoption("--gpu")
    if on_gpu or config.getoption("--long") or config.getoption("--slow-since"):
        config.option.markexpr = ""
    flags += [] if on_gpu or config.getoption("--long") else quick_to_compile()
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu" if on_gpu else "cpu")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))

    from hypothesis import settings

    settings.register_profile("usual", max_examples=8, deadline=None, derandomize=True)
    settings.register_profile("long", settings.get_profile("usual"), max_examples=200)
    settings.load_profile("long" if config.getoption("--long") else "usual")


def leave_out_slow_tests(revision: str, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests of rooms that are as they were in a revision."""
    from helpers.changed_rooms import calls_for, changed_since, rooms_to_test

    rooms = rooms_to_test(changed_since(revision))
    chosen, left_out = [], []
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        is_chosen = item.get_closest_marker("slow") is None or calls_for(rooms, path)
        (chosen if is_chosen else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if in_dtypes := getattr(metafunc.function, "in_dtypes", None):  # dtype_rows.py
        metafunc.parametrize(*in_dtypes(metafunc.config.getoption("--long")))


# Files that take long for the number of their tests: about so many seconds.
LONG_FILES = {
    "attention/kernels/test_cache_on_a_mesh.py": 60,
    "attention/kernels/test_meshes.py": 60,
    "attention/kernels/test_meshes_for_tpus.py": 20,
    "bench/pair/test_checkpoint.py": 50,
    "bench/pair/test_pair_command.py": 20,
    "bench/test_programs.py": 20,
    "cli/test_check.py": 40,
    "models/test_generate.py": 40,
    "models/test_meshes.py": 15,
    "models/test_minilm.py": 20,
    "models/test_training_whole_models.py": 30,
    "models/test_whole_models.py": 120,
    "nn/test_meshes.py": 20,
    "selfcheck/power/test_planted_bugs.py": 25,
    "parity/checking/test_on_mesh.py": 20,
    "porting/verify/test_verify_checkpoint.py": 30,
    "porting/verify/test_verify_layers.py": 35,
    "porting/verify/test_verify_model.py": 40,
    "parity/explaining/test_explain.py": 30,
    "selfcheck/matrix/test_on_mesh.py": 40,
    "training/test_training.py": 25,
    "test_docs.py": 110,
}


@pytest.hookimpl(trylast=True)  # after tests are deselected by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers begin with the longest files, so that none is left alone with one at the end."""
    if revision := config.getoption("--slow-since"):
        leave_out_slow_tests(revision, config, items)
    if hasattr(config, "workerinput"):
        counts = collections.Counter(item.path for item in items)
        long = {path: LONG_FILES.get(path.relative_to(HERE).as_posix(), 0) for path in counts}
        items.sort(key=lambda item: (-long[item.path], -counts[item.path], item.path))


def pytest_collection_finish() -> None:
    """Look for garbage less often, and not in what was imported: that was a quarter of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """All of a file's tests go to one worker, and share what they compile."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # the workers order their items
    return LoadFileScheduling(config, log)


def pytest_report_header() -> list[str]:
    return ["torch is not installed: files that need it are skipped"] if TORCH_IS_ABSENT else []
