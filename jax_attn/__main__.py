"""Entry point of `python -m jax_attn`, the same as `jax-attn`."""

import sys
import traceback


def run() -> None:
    """Run the command line; report Ctrl-C during import like any other.

    An error that no command expects shows its traceback and exits with a status of its own.
    """
    try:
        from jax_attn.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    try:
        main(prog_name="jax-attn")
    except Exception:
        traceback.print_exc()
        print("Error: a mistake of jax-attn, and no verdict; please report it", file=sys.stderr)
        sys.exit(70)


if __name__ == "__main__":
    run()
