"""A user's tables for the attention of BERT's files.

`--layout helpers.transfer.port_tables:RIGHT` names one.
"""

from jax_attn.transfer import Layout, heads, heads_in, linear, row


def table(*query_steps):
    at, to = "encoder.layer.{layer}.attention", "layers.{layer}.attn"
    names = {"self.query": "q_proj", "self.key": "k_proj", "self.value": "v_proj"}
    steps = {"q_proj": query_steps}
    return Layout(
        *(
            row(f"{at}.{t}.weight", f"{to}.{f}.kernel", *steps.get(f, (linear, heads)))
            for t, f in names.items()
        ),
        *(row(f"{at}.{t}.bias", f"{to}.{f}.bias", heads) for t, f in names.items()),
        row(f"{at}.output.dense.weight", f"{to}.out_proj.kernel", linear, heads_in),
        row(f"{at}.output.dense.bias", f"{to}.out_proj.bias"),
    )


RIGHT = table(linear, heads)
TURNED = table(heads)  # a square weight that is not transposed
