"""What `jax-attn verify` can verify, and how it says what it finds."""
