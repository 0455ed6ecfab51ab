"""The modes of `jax-attn verify`, and how it reports its outcome."""
