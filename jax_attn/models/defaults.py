"""What a checkpoint says of generation: which tokens end a row, and how they are drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_attn.attention import checks
from jax_attn.models import sampling
from jax_attn.models.sampling import Sampling

_IDLE = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
"""Numbers of the file that change nothing."""

_TOP_K = 50
"""The top-k of transformers for a file that draws and names none."""

_OTHERS = {
    **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0.0),
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "sequence_bias", "top_h")),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "watermarking_config")),
}
"""Other options that change which tokens come, and their values that change nothing."""


_NOTHING = Sampling()


@dataclass(frozen=True)
class Defaults:
    """What `generate` does unless its arguments say otherwise.

    Attributes:
      ends: the tokens that end a row.
      draws: whether tokens are drawn; otherwise the likeliest is taken.
      sampling: the numbers by which they are drawn, when they are.
      refused: what the file asks for and is not supported, or is wrong; `generate` refuses it.
    """

    ends: tuple[int, ...] = ()
    draws: bool = False
    sampling: Sampling = _NOTHING
    refused: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> "Defaults":
        """Read a generation_config.json; without one, a model's config says what ends a row.

        An end outside the vocabulary never comes, so it is left out.
        """
        file = {"eos_token_id": config.get("eos_token_id")} if generation is None else generation
        found = file.get("eos_token_id")
        ends = () if found is None else found if isinstance(found, Sequence) else (found,)
        refused = []
        if not all(map(checks.is_int, ends)):
            refused.append(f"eos_token_id: expected tokens, got {found!r}")
            ends = ()
        if checks.is_int(config.get("vocab_size")):
            ends = [end for end in ends if end < config["vocab_size"]]
        numbers = {name: file.get(name) for name in Sampling._fields}
        for name, idle in _IDLE.items():
            numbers[name] = None if numbers[name] == idle else numbers[name]
        if draws := bool(file.get("do_sample")):
            numbers["temperature"] = numbers["temperature"] or 1.0
            numbers["top_k"] = _TOP_K if file.get("top_k") is None else numbers["top_k"]
        wanted = Sampling(**numbers)
        refused += sampling.problems(wanted._replace(temperature=wanted.temperature or 1.0))
        for name, neutral in _OTHERS.items():
            if file.get(name) not in (None, neutral, []):
                refused.append(f"{name}: not supported, got {file[name]!r}")
        return cls(tuple(ends), draws, wanted, tuple(refused))
