"""Arguments that are not checkpoints on this disk: a name on the Hub, an adapter.

Nothing is downloaded or merged here: the error names the command that does it.
"""

import os
import re
from pathlib import Path

from jax_attn.transfer.problems import file_error

_HUB_NAME = re.compile(r"(?:hf:/+|https?:/+huggingface\.co/)?([\w.-]+/[\w.-]+)/?")
_ADAPTER = re.compile(r"adapter_config\.json|adapter_model\.(safetensors|bin)")

_MERGE = (
    "merge it into its base model in Python, and pass the new folder: from peft import "
    "AutoPeftModelForCausalLM; AutoPeftModelForCausalLM.from_pretrained({!r}).merge_and_unload()"
    ".save_pretrained({!r})"
)


def download_hint(path: Path) -> str:
    """Return the command that downloads a name such as "org/model"; "" for any other path.

    A path into an existing folder is taken for a mistyped file, not for a name.
    """
    match = _HUB_NAME.fullmatch(str(path))
    if match is None or os.path.lexists(path) or os.path.isdir(path.parent):
        return ""
    folder = match[1].partition("/")[2]
    return (
        f"get a local folder first: hf download {match[1]} --local-dir {folder}; then pass {folder}"
    )


def expect_local(path: Path) -> None:
    """Raise TransferError for a name on the Hub, and for an adapter or a folder that holds one."""
    if hint := download_hint(path):
        text = "expected a folder or a file, which does not exist; nothing is downloaded"
        raise file_error(path, text, hint)
    try:
        names = os.listdir(path) if os.path.isdir(path) else [path.name]
    except OSError:  # opening it reports the reason
        return
    if signs := sorted(filter(_ADAPTER.fullmatch, names)):
        folder = path if os.path.isdir(path) else path.parent
        text = f"expected all weights of a model, got the folder of an adapter: {', '.join(signs)}"
        raise file_error(path, text, _MERGE.format(str(folder), f"{folder.name}-merged"))
