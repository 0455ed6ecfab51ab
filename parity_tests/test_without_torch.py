"""What works, and stays light, where torch is absent: run with torch there and without it."""

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_attn.cli import COMMANDS

LOADED = "print('loaded', *({'jax', 'flax', 'torch'} & set(sys.modules)))"
BLOCK_TORCH = "sys.modules['torch'] = None"


def python(code: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parent,
    )


JUDGING = (
    "selfcheck.oracle",
    "parity.judge.budget",
    "parity.judge.compare",
    "parity.judge.result",
    "selfcheck.matrix.cases",
    "parity.run.inputs_and_runs",
    "parity.checking.judged",
    "parity.golden.golden",
    "parity.explaining.explanation",
    "report.documents",
)
HELP = ["--help", "--version", *(f"{name} --help" for name in COMMANDS)]
# What a fresh interpreter runs -> which frameworks it has then; some show that some can be there.
LOADS = {
    **{
        f"from jax_attn.cli import main; main({args.split()}, standalone_mode=False)": set()
        for args in HELP
    },
    f"import {', '.join(f'jax_attn.{module}' for module in JUDGING)}": set(),
    "import jax_attn; jax_attn.parity.check, jax_attn.parity.load_golden": {"jax", "flax"},
}
SLOW_LOADS = {
    "import jax_attn; jax_attn.MultiHeadAttention": {"jax", "flax"},
    "import jax_attn.parity.run.port": {"jax", "flax"},
    "import jax_attn.porting.inspect.discover, jax_attn.porting.inspect.config": set(),
    "import jax_attn.porting.verify.survey": {"jax", "flax", "torch"},
    "import torch_ref": {"torch"},
    "import torch_ref, jax": {"torch", "jax"},
}


@pytest.mark.parametrize(
    ("code", "loaded"),
    [*LOADS.items(), *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_LOADS.items())],
)
def test_what_is_imported(code, loaded):
    done = python(f"{code}; {LOADED}")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1].split()) == {"loaded", *loaded}


WITHOUT_TORCH = {
    "every public name": "import jax_attn; [getattr(jax_attn, n) for n in jax_attn.__all__]",
    "a module": (
        "import jax_attn, jax.numpy as jnp; from flax import nnx;"
        "jax_attn.MultiHeadAttention(6, 2, rngs=nnx.Rngs(0))(jnp.ones((1, 3, 6)))"
    ),
    "a check by a golden reference": (
        "from jax_attn.cli import main; main('check --golden parity/golden/data/attention"
        " helpers.parity.written_golden:attention --transforms eager'.split())"
    ),
    "an optimizer's state": (
        "import numpy, optax; from jax_attn import transfer;"
        "state = {'state': {0: {'momentum_buffer': numpy.ones((2, 3), 'float32')}},"
        " 'param_groups': [{'momentum': 0.9, 'dampening': 0, 'params': [0]}]};"
        "here = optax.sgd(0.1, 0.9).init({'kernel': numpy.zeros((3, 2), 'float32')});"
        "there = transfer.load_optimizer(here, state, transfer.LINEAR, ['weight']);"
        "back = transfer.export_optimizer(there, state, transfer.LINEAR, ['weight']);"
        "assert back['state'][0]['momentum_buffer'].shape == (2, 3)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", WITHOUT_TORCH)
def test_works_where_torch_cannot_be_imported(row):
    done = python(f"{BLOCK_TORCH}; {WITHOUT_TORCH[row]}")
    assert done.returncode == 0, done.stderr


def test_torch_is_really_blocked_there():
    assert python(f"{BLOCK_TORCH}; import torch").returncode != 0
    assert python(f"{BLOCK_TORCH}; import jax_attn; jax_attn.parity.prepare").returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize(("begin", "passes"), [(BLOCK_TORCH, True), ("import torch", False)])
def test_ports_are_judged_by_golden_references_where_there_is_no_torch(begin, passes):
    """The tests of those that were written pass there; that this shows it, the second row shows."""
    file = Path(__file__).parent / "parity" / "golden" / "test_written_golden.py"
    options = ["-q", "-p", "no:cacheprovider", str(file)]
    without = "assert sys.modules.get('torch') is None"
    done = python(f"{begin}; import pytest; assert pytest.main({options}) == 0; {without}")
    assert (done.returncode == 0) == passes, done.stdout + done.stderr


def collected(tmp_path: Path, *imports: str) -> subprocess.CompletedProcess:
    """The suite's conftest over files of one import each, where torch is blocked."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text())
    for name in imports:
        (tmp_path / f"test_{name}.py").write_text(f"import {name}\ndef test_it(): pass")
    options = ["-ra", "-p", "no:cacheprovider", str(tmp_path)]
    return python(f"{BLOCK_TORCH}; import pytest; sys.exit(pytest.main({options}))")


@pytest.mark.slow
def test_files_that_import_torch_are_skipped_by_name_and_others_run(tmp_path):
    done = collected(tmp_path, "torch", "torch_ref", "math")
    assert done.returncode == 0, done.stdout
    assert "torch is not installed: files that need it are skipped" in done.stdout
    assert "1 passed, 2 skipped" in done.stdout
    assert "test_torch.py needs torch" in done.stdout
    assert "test_torch_ref.py needs torch" in done.stdout


@pytest.mark.slow
def test_a_file_that_misses_anything_else_is_an_error(tmp_path):
    done = collected(tmp_path, "torch", "no_such_module")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert re.search(r"ERROR collecting \S*test_no_such_module.py", done.stdout)
    assert "No module named 'no_such_module'" in done.stdout


@pytest.mark.parametrize("package", ["jax_attn", "jax_attn.parity"])
def test_every_public_name_is_there_for_type_checkers(package):
    module = importlib.import_module(package)
    (block,) = (x for x in ast.parse(Path(module.__file__).read_text()).body if type(x) is ast.If)
    names = {alias.name for statement in block.body for alias in statement.names}
    assert names == {*module.__all__}


@pytest.mark.parametrize("package", ["jax_attn", "jax_attn.parity", "jax_attn.transfer"])
def test_completion_finds_the_public_names_and_no_others(package):
    module = importlib.import_module(package)
    assert [name for name in dir(module) if name != "__version__"] == sorted(module.__all__)
    absent = ModuleNotFoundError if importlib.util.find_spec("torch") is None else ()
    for name in dir(module):
        with contextlib.suppress(absent):
            getattr(module, name)


def test_verify_leaves_3_with_the_line_that_installs_torch():
    absent = (
        "import importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)"
    )
    done = python(f"{absent}; from jax_attn.cli import main; main(['verify'])")
    assert done.returncode == 3
    assert "torch is not installed" in done.stderr
    assert "pip install" in done.stderr
