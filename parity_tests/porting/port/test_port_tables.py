"""Users' own tables for `jax-attn port`: a bad one is named, a good one carried and proved."""

import random

import numpy as np
import pytest

from helpers.transfer.port_cases import D, H, K, N, V
from jax_attn.porting.port.carry_and_prove import Carried, prove
from jax_attn.porting.port.plan import plan_port
from jax_attn.porting.port.table import PortTable
from jax_attn.transfer.table.layout import Layout
from jax_attn.transfer.table.rows import either, ignored, row, tied
from jax_attn.transfer.table.steps import Sizes, grouped, heads, heads_in, inward, linear, packed


def attention(*rows):
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    split = [row(f"{t}.weight", f"{f}.kernel", linear, heads) for t, f in names.items()]
    paths = [f"{f}.kernel" for f in names.values()]
    packed_row = row("qkv.weight", paths, packed, linear, heads)
    return Layout(
        either(packed_row, split), row("o.weight", "out_proj.kernel", linear, heads_in), *rows
    )


HELD = {f"{n}.weight": np.ones((N * H if n == "q" else K * H, D), "f4") for n in "qkv"}
HELD["o.weight"] = np.ones((D, N * H), "f4")
PACKED = {"qkv.weight": np.ones(((N + 2 * K) * H, D), "f4")}
MAPPINGS = {
    "packed and split": (attention(), HELD | PACKED, "ambiguous"),
    "one path written twice": (
        attention(row("again.weight", "q_proj.kernel", linear, heads)),
        HELD | {"again.weight": HELD["q.weight"]},
        "doubly written",
    ),
    "one key read twice": (
        attention(row("q.weight", "other.kernel", linear, heads)),
        HELD,
        "doubly written",
    ),
    "layers of two shapes": (
        attention(row("h.{layer}.w", "h.{layer}.w")),
        HELD | {f"h.{i}.w": np.ones((7, 2 + (i == 1)), "f4") for i in range(3)},
        "expected [7, 2], as 2 of 3 layers have it, got [7, 3]",
    ),
    "some biases only": (
        attention(row("q.bias", "q_proj.bias", heads)),
        HELD | {"q.bias": np.ones(N * H, "f4")},
        "biases of all three or of none",
    ),
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_table_that_does_not_fit_is_named(name):
    layout, held, said = MAPPINGS[name]
    if name == "some biases only":
        layout += Layout(row("k.bias", "k_proj.bias", heads), row("v.bias", "v_proj.bias", heads))
    port = plan_port(held, PortTable(layout, Sizes(N, K, H)), "flax")
    assert any(said in str(problem) for problem in port.problems), port.problems


def test_a_file_with_only_the_tied_key_is_carried_whole():
    layout = Layout(row("embed.weight", "embed.embedding"), tied("lm_head.weight", "embed.weight"))
    held = {"lm_head.weight": np.ones((V, D), "f4")}
    port = plan_port(held, PortTable(layout, Sizes(N, K, H)), "flax")
    assert (port.problems, [*port.targets], port.passed_over) == ([], ["embed.embedding"], {})


def test_parts_of_two_dtypes_are_no_packed_tensor():
    paths = ["q_proj.kernel", "k_proj.kernel", "v_proj.kernel"]
    layout = Layout(row("qkv.weight", paths, packed, linear, heads))
    held = {path: np.ones((D, K, H), "f4") for path in paths} | {paths[1]: np.ones((D, K, H), "f8")}
    (problem,) = plan_port(held, PortTable(layout, Sizes(K, K, H)), "torch").problems
    assert (problem.kind, problem.hint) == ("wrong dtype", "pass --dtype to cast them all")


def test_only_what_came_back_counts_as_carried():
    port = plan_port(HELD, PortTable(attention(), Sizes(N, K, H)), "flax")
    written = dict(Carried(port, HELD))
    written["out_proj.kernel"] = written["out_proj.kernel"] * 2
    proof = prove(port, HELD, written)
    assert [problem.name for problem in proof.problems] == ["o.weight"]
    assert proof.carried == sum(a.nbytes for k, a in HELD.items() if k != "o.weight")
    del written["out_proj.kernel"]
    (problem,) = prove(port, HELD, written).problems
    assert problem.name == "out_proj.kernel"


def test_heads_that_nobody_names_are_asked_for():
    (problem,) = plan_port(HELD, PortTable(attention(), None), "flax").problems
    assert "--num-heads" in problem.hint


# --- tables at random -----------------------------------------------------------------------------


@pytest.mark.slow
def test_tables_of_random_mutations_never_crash_nor_carry_wrongly(request):
    """Rows, steps, keys and shapes at random: an error that says why, or a port that is proved."""
    count = 10_000 if request.config.getoption("--long") else 300
    outcomes = {"refused": 0, "unfit": 0, "proved": 0}
    for seed in range(count):
        outcomes[mutated(random.Random(seed))] += 1
    assert min(outcomes.values()) > count / 100, outcomes


AT, TO = "h.{layer}", "layers.{layer}"
ROWS = [
    ([f"{AT}.q.weight"], [f"{TO}.q_proj.kernel"], [linear, heads]),
    ([f"{AT}.k.weight"], [f"{TO}.k_proj.kernel"], [linear, heads]),
    ([f"{AT}.v.weight"], [f"{TO}.v_proj.kernel"], [linear, heads]),
    ([f"{AT}.o.weight"], [f"{TO}.out_proj.kernel"], [linear, heads_in]),
    ([f"{AT}.up.weight"], [f"{TO}.up.kernel"], [linear]),
    (["wte.weight"], ["token_embedding.embedding"], []),
]
WIDTHS = {"q": (N * H, D), "k": (K * H, D), "v": (K * H, D), "o": (D, N * H), "up": (7, D)}
SHAPES = {f"h.{i}.{name}.weight": shape for i in range(2) for name, shape in WIDTHS.items()}
SHAPES["wte.weight"] = (V, D)
STEPS = [linear, heads, heads_in, packed, grouped, inward]
WORDS = ["q", "k", "0", "1", "2", "{layer}", "{expert}", "weight", "q_proj", "kernel", "", "é"]


def mutated(rng: random.Random) -> str:
    """One table and one set of tensors, changed in up to three places: what becomes of them."""
    rows = [tuple(map(list, parts)) for parts in ROWS]
    shapes = dict(SHAPES)
    for _ in range(rng.randint(0, 3)):
        rng.choice([bent_row, bent_row, bent_shapes])(rng, rows, shapes)
    try:
        made = [row(keys, paths, *steps) for keys, paths, steps in rows]
        made += [ignored(rng.choice([*shapes, "none"]), "drawn")] * (rng.random() < 0.2)
        layout = Layout(*made)
    except ValueError:
        return "refused"
    held = {key: np.arange(np.prod(s), dtype="f4").reshape(s) for key, s in shapes.items()}
    table = PortTable(layout, rng.choice([Sizes(N, K, H)] * 4 + [None, Sizes(3, 1, 2)]))
    port = plan_port(held, table, "flax")
    if port.problems:
        return "unfit"
    carried = Carried(port, held)
    written = {name: carried[name].copy() for name in carried}
    proof = prove(port, held, written)
    assert proof.problems == []
    assert proof.carried + proof.passed_over == sum(array.nbytes for array in held.values())
    back = plan_port(written, table, "torch")
    assert back.problems == []
    returned = Carried(back, written)
    assert all(returned[key].tobytes() == held[key].tobytes() for key in returned)
    return "proved"


def bent_row(rng: random.Random, rows: list, shapes: dict) -> None:
    """Another step, another word in a name, one more or one less row, key or path."""
    keys, paths, steps = rows[rng.randrange(len(rows))]
    names = rng.choice([keys, paths])
    match rng.randrange(6):
        case 0:
            steps.insert(rng.randint(0, len(steps)), rng.choice(STEPS))
        case 1:
            steps[:] = steps[1:]
        case 2:
            parts = names[0].split(".")
            parts[rng.randrange(len(parts))] = rng.choice(WORDS)
            names[0] = ".".join(parts)
        case 3:
            names.append(rng.choice(rows)[rng.randrange(2)][0])
        case 4:
            rows.append(tuple(map(list, rng.choice(rows))))
        case 5 if len(rows) > 1:
            rows.pop(rng.randrange(len(rows)))


def bent_shapes(rng: random.Random, rows: list, shapes: dict) -> None:
    """Another shape, one more or one less tensor, another key."""
    key = rng.choice([*shapes])
    match rng.randrange(4):
        case 0:
            shapes[key] = tuple(rng.choices([0, 1, 5, 15, D], k=rng.randint(0, 3)))
        case 1 if len(shapes) > 1:
            del shapes[key]
        case 2:
            shapes[f"{key}.{rng.choice(WORDS)}"] = shapes[key]
        case 3:
            shapes[rng.choice(["module.", "h.7.", ""]) + key] = shapes.pop(key)
