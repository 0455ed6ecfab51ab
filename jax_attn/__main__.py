"""`python -m jax_attn` is `jax-attn`."""

from jax_attn.cli import main

main(prog_name="jax-attn")
