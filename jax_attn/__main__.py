"""Entry point of `python -m jax_attn`, the same as `jax-attn`."""

import sys


def run() -> None:
    """Run the command line; report Ctrl-C during import like any other."""
    try:
        from jax_attn.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    main(prog_name="jax-attn")


if __name__ == "__main__":
    run()
