"""The parts of `jax-attn check`: what it runs, and how it runs again."""
