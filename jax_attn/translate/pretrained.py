"""Read a model from a folder by the library that wrote it: transformers or diffusers.

The class is the one that the folder's config names. Weights are read strictly: a parameter that the
folder lacks is an error, and a tensor that the model does not have is told. Nothing is downloaded,
and Python files in the folder are never run.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jax_attn.environment import free_memory, install_line, present
from jax_attn.families.config import Config, Reading
from jax_attn.families.whole import architecture, is_mxfp4, unusable
from jax_attn.transfer import Problem, TransferError, load_checkpoint
from jax_attn.transfer.arrays import specs
from jax_attn.transfer.files.mxfp4 import dequantized
from jax_attn.transfer.files.port_folder import beside, read_config

MAKE_IT = (
    "write FILE.py with a function that makes the model and returns (module, inputs), and run "
    "jax-attn translate FILE.py:FUNCTION OUT"
)


class Pretrained(NamedTuple):
    """Hold a model in eval mode. unexpected: tensors of the folder that it does not have."""

    module: torch.nn.Module
    unexpected: tuple[str, ...]
    rest: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on what of the folder is not in the module."""
        unread = ", ".join(self.unexpected)
        rest = ", ".join(self.rest)
        return (
            *([f"tensors of the folder that the model does not have: {unread}"] if unread else ()),
            *([f"a part of the model; not compared: {rest}"] if rest else ()),
        )


def pretrained(path: Path, part: str | None = None) -> Pretrained:
    """Read the model of a folder, or a part of it, in float32.

    Args:
      path: the folder, with its config.json, or a file of tensors in it.
      part: the path of a module in the model, such as "text_model" or "encoder".

    Raises:
      TransferError: the model cannot be read, with every reason; also if the library that wrote the
        folder is not installed.
      MemoryError: translating and comparing the model takes more memory than is free.
    """
    folder = beside(path)
    config = _config(folder)
    library, _, read = next(row for row in _LIBRARIES if row[1](config))
    if not present(library):
        line = install_line("hf") if library == "transformers" else f"pip install {library}"
        text = f"{library}, which reads this folder, is not installed"
        raise TransferError(f"reading {folder}", [Problem("refused", str(folder), text, line)])
    expect_memory(folder, within=part or "")
    found = read(folder, config)
    _without_cache(found.module)
    return found if part is None else _part(found, part)


def _config(folder: Path) -> Config:
    """Return the config of a folder. Raises TransferError if its model cannot be read."""
    if (folder / _PIPELINE).is_file():
        parts = sorted(str(config.parent.name) for config in folder.glob("*/config.json"))
        text = "expected one model, got a pipeline of several; pass one of its folders: "
        text += ", ".join(parts)
        raise TransferError(f"reading {folder}", [Problem("refused", _PIPELINE, text)])
    config = read_config(folder)
    if config is None:
        text = "expected a config.json that names the model's class, got none"
        raise TransferError(f"reading {folder}", [Problem("file", str(folder), text, MAKE_IT)])
    if problems := [*_unread(config)]:
        raise TransferError(f"reading {folder}", problems)
    return config


def expect_memory(path: Path, compared: float = math.inf, within: str = "") -> None:
    """Raise MemoryError if a check of a file's model would need more memory than is free.

    compared: the number of parameters whose gradients are compared at once. within: a part of the
    model, which alone is checked.
    """
    with load_checkpoint(path) as tensors:
        is_packed = is_mxfp4(read_config(path) or {})
        plain = dequantized(tensors)[0] if is_packed else tensors
        shapes = {key: spec.shape for key, spec in specs(plain)[0].items()}
    count = sum(
        math.prod(shape)
        for key, shape in shapes.items()
        if not within or f".{within}." in f".{key}"
    )
    free = free_memory()
    needed = _BYTES * count + _BYTES_COMPARED * min(count, compared)
    if free is not None and needed > free:
        have = f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
        raise MemoryError(f"this check takes about {have}")


_BYTES, _BYTES_COMPARED = 28, 47
"""Bytes of memory for each parameter, and further bytes if its gradient is compared at once."""

_PIPELINE = "model_index.json"


_OF_TIMM = (
    "write FILE.py with a function that returns (timm.create_model('local-dir:FOLDER', "
    "pretrained=True), inputs), and run jax-attn translate FILE.py:FUNCTION OUT"
)


def _unread(config: Config) -> Iterator[Problem]:
    if "architecture" in config:
        text = "expected a folder of transformers or diffusers, got one of timm"
        yield Problem("refused", "architecture", text, _OF_TIMM)
    if "_class_name" not in config:  # the fields of transformers' configs
        yield from unusable(config)
    if config.get("auto_map"):
        text = "the model's class is Python code beside the weights, which is not run"
        yield Problem("refused", "auto_map", text, MAKE_IT)


def _without_cache(module: torch.nn.Module) -> None:
    """Ask transformers' modules for no cache: it would be an output that is no array."""
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if getattr(config, "use_cache", None):
            config.use_cache = False


def _part(found: Pretrained, part: str) -> Pretrained:
    """Return a module of the model. Raises TransferError if there is none of this name."""
    whole = found.module
    parts = [name for name, child in whole.named_children() if [*child.parameters()]]
    try:
        module = whole.get_submodule(part)
    except AttributeError as error:
        text = f"expected a module of {type(whole).__name__}, such as {', '.join(parts)}"
        problem = Problem("missing", "part", f"{text}; got {part!r}")
        raise TransferError("finding the part", [problem]) from error
    own = {id(each) for each in module.parameters()}
    others = (
        name for name in parts if {id(p) for p in whole.get_submodule(name).parameters()} - own
    )
    return found._replace(module=module, rest=tuple(others))


# --- transformers ---------------------------------------------------------------------------------


def transformers_class(config: Config) -> Any:
    """Return the model class of transformers that a config names first, or AutoModel for none.

    Raises TransferError if the name is not that of a model of transformers.
    """
    import transformers

    if not (name := architecture(Reading(config))):
        return transformers.AutoModel
    named = getattr(transformers, name, None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        return named
    text = f"expected a model of transformers {transformers.__version__}, got {name!r}"
    raise TransferError("reading the config", [Problem("refused", "architectures", text)])


def read_by_transformers(folder: Path, kind: Any, **options: Any) -> Pretrained:
    """Read a model by a class of transformers, with further options of `from_pretrained`.

    Weights in MXFP4 are dequantized. Raises TransferError for parameters that transformers would
    draw at random, and for what transformers refuses.
    """
    if is_mxfp4(read_config(folder) or {}):
        from transformers.utils.quantization_config import Mxfp4Config

        options |= {"quantization_config": Mxfp4Config(dequantize=True)}
    with _quiet(), _refused_by("transformers", folder, kind.__name__):
        model, loaded = kind.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, **options
        )
    return _complete(model, loaded, f"reading {folder} by transformers")


def _complete(model: torch.nn.Module, loaded: dict[str, Any], reading: str) -> Pretrained:
    """Return a loaded model, unless it lacks weights.

    loaded: what the library tells of keys. reading: what is done, for the error.
    """
    missing = sorted(map(str, (*loaded["missing_keys"], *loaded["mismatched_keys"])))
    if missing:
        text = "expected a tensor of this name and of the shape that config.json gives; got none"
        problems = [Problem("missing", key, text) for key in missing]
        raise TransferError(reading, problems)
    return Pretrained(model.eval(), tuple(sorted(map(str, loaded["unexpected_keys"]))))


@contextlib.contextmanager
def _refused_by(library: str, folder: Path, name: str) -> Iterator[None]:
    """Turn any error of a library into a TransferError; memory that runs out stays what it is."""
    try:
        yield
    except (MemoryError, TransferError):
        raise
    except Exception as error:  # such as huggingface_hub's StrictDataclassError
        problem = Problem("refused", name, f"{library} raises {type(error).__name__}: {error}")
        raise TransferError(f"reading {folder} by {library}", [problem]) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its loading reports."""
    from transformers.utils import logging

    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()


def _by_transformers(folder: Path, config: Config) -> Pretrained:
    return read_by_transformers(folder, transformers_class(config), dtype=torch.float32)


# --- other libraries ------------------------------------------------------------------------------


def _by_diffusers(folder: Path, config: Config) -> Pretrained:
    diffusers = importlib.import_module("diffusers")
    name = config["_class_name"]
    kind: Any = getattr(diffusers, str(name), None)
    is_model = isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)
    if not is_model:
        text = f"expected a model of diffusers {diffusers.__version__}, got {name!r}"
        raise TransferError("reading the config", [Problem("refused", "_class_name", text)])
    with _refused_by("diffusers", folder, kind.__name__):
        model, loaded = kind.from_pretrained(
            folder,
            local_files_only=True,
            low_cpu_mem_usage=False,
            torch_dtype=torch.float32,
            output_loading_info=True,
        )
    return _complete(model, loaded, f"reading {folder} by diffusers")


_LIBRARIES: tuple[
    tuple[str, Callable[[Config], bool], Callable[[Path, Config], Pretrained]], ...
] = (
    ("diffusers", lambda config: "_class_name" in config, _by_diffusers),
    ("transformers", lambda config: True, _by_transformers),
)
"""Libraries, how their configs are told apart, and how they read a folder; the first counts."""
