"""`python -m jax_attn` is `jax-attn`."""

import sys


def run() -> None:
    """The command line; Ctrl-C while it is imported is told as Ctrl-C later is."""
    try:
        from jax_attn.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    main(prog_name="jax-attn")


if __name__ == "__main__":
    run()
