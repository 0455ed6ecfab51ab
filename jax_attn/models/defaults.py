"""Read what a checkpoint says of generation: which tokens end a row, and how they are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_attn.attention import checks
from jax_attn.models import sampling
from jax_attn.models.sampling import Sampling
from jax_attn.transfer import TransferError
from jax_attn.transfer.files.port_folder import GENERATION, read_config

_IDLE = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Numbers of the file that change nothing."""

_TOP_K = 50
"""The top-k of transformers for a file that draws and names none."""

_OTHERS = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), 1.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "penalty_alpha"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias")),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "watermarking_config")),
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids")),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), False),
}
"""Other options that change which tokens come, and their values that change nothing."""

_OTHERS_OF_DRAWS = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}
"""Those that count only if tokens are drawn."""

OF_DRAWS = frozenset(("top_k", "top_p", "min_p", *_OTHERS_OF_DRAWS))
"""Every option that counts only if tokens are drawn."""

_STARTS = ("decoder_start_token_id", "bos_token_id")
"""Names of a decoder's first token, in the order of transformers."""

_NOTHING = Sampling()


@dataclass(frozen=True)
class Defaults:
    """Behaviour of `generate` unless its arguments say otherwise.

    Attributes:
      ends: the tokens that end a row.
      draws: whether tokens are drawn; otherwise the likeliest is taken.
      sampling: the numbers by which they are drawn, when they are.
      start: the token with which a decoder begins that reads an encoder; None if none is named.
      refused: options that are wrong or not supported, each with the reason. `generate` refuses
        those that would count.
    """

    ends: tuple[int, ...] = ()
    draws: bool = False
    sampling: Sampling = _NOTHING
    refused: tuple[tuple[str, str], ...] = ()
    start: Any = None

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> "Defaults":
        """Read a generation_config.json; without one, the same options of a model's config.

        An end outside the vocabulary never comes, so it is left out.
        """
        file = config if generation is None else generation
        ends, refused = _ends(file.get("eos_token_id"), config.get("vocab_size"))
        draws = file.get("do_sample") or False
        if not isinstance(draws, bool):
            refused["do_sample"] = f"expected true or false, got {draws!r}"
            draws = False
        numbers = {name: x for name in Sampling._fields if (x := file.get(name)) is not None}
        if draws:
            numbers = {"temperature": 1.0, "top_k": _TOP_K} | numbers
        for name, x in [*numbers.items()]:
            if checks.is_real(x) and x == _IDLE.get(name):
                del numbers[name]
            elif problems := sampling.problems(Sampling(temperature=1.0)._replace(**{name: x})):
                del numbers[name]
                if draws or name != "temperature":
                    refused[name] = problems[0].partition(": ")[2]
        for name, neutral in (_OTHERS | _OTHERS_OF_DRAWS).items():
            if (x := file.get(name)) not in (None, neutral, []):
                refused[name] = f"not supported, got {x!r}"
        starts = (f.get(name) for name in _STARTS for f in (file, config))
        start = next((token for token in starts if token is not None), None)
        return cls(ends, draws, Sampling(**numbers), tuple(refused.items()), start)


def read(path: Path, config: Mapping[str, Any]) -> tuple[Defaults, dict[str, Any] | None]:
    """Return the defaults of a checkpoint, and its generation_config.json if it has one.

    A file that cannot be read is refused by `generate` alone: most models are not for generation.
    """
    try:
        generation = read_config(path, (GENERATION,))
    except TransferError as error:
        return Defaults(refused=((GENERATION, error.problems[0].text),)), None
    return Defaults.of(config, generation), generation


def _ends(found: Any, vocab_size: Any) -> tuple[tuple[int, ...], dict[str, str]]:
    """Return the ends that may come, and why they are refused if they are no tokens."""
    ends = () if found is None else found if isinstance(found, Sequence) else (found,)
    if not all(map(checks.is_int, ends)):
        return (), {"eos_token_id": f"expected tokens, got {found!r}"}
    most = vocab_size if checks.is_int(vocab_size) else float("inf")
    return tuple(end for end in ends if 0 <= end < most), {}
