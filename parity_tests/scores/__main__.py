"""Score verifiers on labelled pairs, and keep what came out.

    python -m scores [--wrong 1000] [--seed 0] [--minutes 60] [--part 1/2]   # from parity_tests/

Each record is kept as soon as it is there, so that a run that was stopped goes on; a part of the
pairs can be scored by each of several processes. Then
`python parity_tests/evidence/scripts/fill_docs.py` writes the page.
"""

import argparse
import tempfile
import time
import warnings

import jax

from jax_attn.environment import describe
from scores import records
from scores.pairs import drawn
from scores.scored import scored


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wrong", type=int, default=1000, help="candidates of wrong ports")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--part", default="1/1", help="such as 1/2, the first of two processes")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    warnings.filterwarnings("ignore")
    records.keep_environment(describe())
    end, kept = time.monotonic() + 60 * given.minutes, records.kept()
    mine = [*drawn(given.seed, given.wrong)][part - 1 :: parts]
    left = [pair for pair in mine if kept.get(pair.name, {}).get("digest") != pair.digest]
    for done, pair in enumerate(left):
        if time.monotonic() > end:
            print(f"the time was up: {len(left) - done} of {len(left)} pairs are left")
            return
        record = scored(pair)
        records.keep(pair.name, record)
        print(f"{done + 1} of {len(left)}: {pair.name}: {record}"[:200], flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as programs:  # a check compiles what scoring has compiled
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        main()
