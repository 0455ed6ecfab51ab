"""Extra keys by their definition: keys like any other, behind the others.

A sink is a key and a value of 0 to which each head's bias gives its score.
"""

import numpy as np


def written_out(query, key, value, bias_k=None, bias_v=None, add_zero_attn=False, sinks=None, **o):
    """The arrays and options, in float64, of the same attention without extra keys.

    Options as the definition's. What masks and biases say holds for the S keys alone; dropout has
    a column for each extra key but the sinks.
    """
    (B, T, N, _), S = query.shape, key.shape[1]
    sinks = -np.inf if sinks is None else np.asarray(sinks, np.float64)[:, None]
    # Key, value, bias and whether there is one: of bias_k, the zero key, the sinks.
    columns = [
        (0 if bias_k is None else bias_k, 0 if bias_v is None else bias_v, 0, bias_k is not None),
        (0, 0, 0, add_zero_attn),
        (0, 0, sinks, True),
    ]
    key, value = (np.asarray(x, np.float64) for x in (key, value))
    bias = np.broadcast_to(np.float64(0 if o.get("bias") is None else o["bias"]), (B, N, T, S))
    allowed = np.broadcast_to(True if o.get("allowed") is None else o["allowed"], (B, N, T, S))
    keep = o.get("keep")
    for k, v, score, there in columns:
        key = np.concatenate([key, np.broadcast_to(k, key[:, :1].shape)], axis=1)
        value = np.concatenate([value, np.broadcast_to(v, value[:, :1].shape)], axis=1)
        more = np.broadcast_to(score, (B, N, T))[..., None]
        bias = np.concatenate([bias, more], axis=-1)
        allowed = np.concatenate([allowed, np.full((B, N, T, 1), there)], axis=-1)
    if keep is not None:
        places = [*range(S), *(S + i for i, column in enumerate(columns[:2]) if column[3])]
        all_of_it = np.ones((B, N, T, S + 3), bool)
        all_of_it[..., places] = keep
        keep = all_of_it
    return (query, key, value), o | {"bias": bias, "allowed": allowed, "keep": keep}


def folded(dq, dk, dv, dbias):
    """Gradients of what was written out -> query, key, value, bias, bias_k, bias_v, sinks."""
    S = dk.shape[1] - 3
    own = dq, dk[:, :S], dv[:, :S], dbias[..., :S]
    return *own, dk[:, S].sum(0), dv[:, S].sum(0), dbias[..., S + 2].sum((0, 2))
