"""Write recurrent layers and cells."""

from typing import Any

from jax_attn.translate.rules.calls import call, refused
from jax_attn.translate.rules.rule import Rule


def _layers(cell: str, states: str) -> Any:
    """Make the rule of layers of one cell."""

    def rule(
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> str:
        if train and dropout and num_layers > 1:
            raise NotImplementedError("dropout between recurrent layers in training mode")
        return call(
            "recurrent",
            cell,
            "input",
            states,
            "params",
            num_layers=None if num_layers == 1 else "num_layers",
            bidirectional=True if bidirectional else None,
            biases=None if has_biases else False,
            batch_first=True if batch_first else None,
        )

    return rule


def _cell(cell: str, states: str, first: str) -> Any:
    """Make the rule of one step."""

    def rule(b_ih: Any, b_hh: Any) -> str:
        x = "input @ w_ih.T" if b_ih is None else "input @ w_ih.T + b_ih"
        return f"{cell}({x}, {states}, w_hh, {'None' if b_hh is None else 'b_hh'}){first}"

    return rule


_PACKED = refused("packed sequences")

RECURRENT: dict[str, Rule] = {
    "aten.lstm.input": _layers("lstm_cell", "hx"),
    "aten.gru.input": _layers("gru_cell", "(hx,)"),
    "aten.rnn_tanh.input": _layers("rnn_tanh_cell", "(hx,)"),
    "aten.rnn_relu.input": _layers("rnn_relu_cell", "(hx,)"),
    "aten.lstm.data": _PACKED,
    "aten.gru.data": _PACKED,
    "aten.rnn_tanh.data": _PACKED,
    "aten.rnn_relu.data": _PACKED,
    "aten.lstm_cell.default": _cell("lstm_cell", "hx", ""),
    "aten.gru_cell.default": _cell("gru_cell", "(hx,)", "[0]"),
    "aten.rnn_tanh_cell.default": _cell("rnn_tanh_cell", "(hx,)", "[0]"),
    "aten.rnn_relu_cell.default": _cell("rnn_relu_cell", "(hx,)", "[0]"),
}
