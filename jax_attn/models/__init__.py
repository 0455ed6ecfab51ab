"""Whole models assembled from this package's modules, their weights read from torch's files."""

from jax_attn.models.bert import BertEncoder
from jax_attn.models.sentence_encoder import SentenceEncoder, load_sentence_encoder, mean_pooled

__all__ = ["BertEncoder", "SentenceEncoder", "load_sentence_encoder", "mean_pooled"]
