"""What `jax-attn port` refuses: a mapping that is wrong, numbers that are none, a bad target. One
message names everything that is, and nothing is written.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from click.testing import CliRunner
from torch_checkpoints import saved

from jax_attn.cli import main
from jax_attn.transfer import load_checkpoint
from jax_attn.transfer.carrying import Carried, prove
from jax_attn.transfer.layout import Layout
from jax_attn.transfer.port_table import Table
from jax_attn.transfer.porting import plan_port
from jax_attn.transfer.rows import either, ignored, row
from jax_attn.transfer.steps import Sizes, grouped, heads, heads_in, inward, linear, packed

D, N, K, H, V = 31, 6, 3, 5, 11
CONFIG = {"model_type": "llama", "hidden_size": D, "num_attention_heads": N, "head_dim": H}
CONFIG |= {"num_key_value_heads": K, "num_hidden_layers": 2, "intermediate_size": 7}
Q = "model.layers.1.self_attn.q_proj.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


def llama(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (V, D)
    for i in range(2):
        at = f"model.layers.{i}"
        rows = {"q_proj": (N * H, D), "k_proj": (K * H, D), "v_proj": (K * H, D)}
        rows["o_proj"] = (D, N * H)
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {
            f"{at}.{n}.weight": (D,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        shapes |= {f"{at}.mlp.{n}_proj.weight": (7, D) for n in ("up", "gate")}
        shapes[f"{at}.mlp.down_proj.weight"] = (D, 7)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def without(*keys):
    return lambda held: {key: array for key, array in held.items() if key not in keys}


def having(**more):
    return lambda held: held | {key.replace("__", "."): array for key, array in more.items()}


def under(prefix):
    return lambda held: {f"{prefix}{key}": array for key, array in held.items()}


def holding(key, *values):
    """The tensor at `key` with its first numbers replaced."""

    def change(held):
        array = held[key].copy()
        array.reshape(-1)[: len(values)] = values
        return held | {key: array}

    return change


def biases(*names):
    return lambda held: (
        held
        | {
            f"model.layers.{i}.self_attn.{n}_proj.bias": np.ones(N * H if n == "q" else K * H, "f4")
            for n in names
            for i in range(2)
        }
    )


def same(held):
    return held


@dataclass(frozen=True)
class Bad:
    """A change of Llama's tensors, options, changes of its config; what must be said."""

    change: Callable = same
    options: tuple[str, ...] = ()
    config: dict = field(default_factory=dict)
    said: tuple[str, ...] = ()
    dtype: str = "float32"


ALL = under("")
BAD = {
    "a missing key": Bad(without(Q), said=("missing", Q, "layer 1 lacks it")),
    "a missing layer": Bad(
        lambda held: {k: a for k, a in held.items() if ".0." not in k},
        said=("expected layers 0 to 1", "expected attention in 2 layers"),
    ),
    "fewer layers than the config has": Bad(
        config={"num_hidden_layers": 3}, said=("expected attention in 3 layers", "none is in [2]")
    ),
    "an unexpected key": Bad(
        having(model__stray=np.ones(3, "f4")), said=("unexpected", "'model.stray'", "no row takes")
    ),
    "a key that is nearly right": Bad(
        lambda held: {k.replace("1.self_attn.q_p", "1.self_attn.p_"): a for k, a in held.items()},
        said=(Q, "nearest: model.layers.1.self_attn.p_roj.weight"),
    ),
    "a buffer": Bad(
        having(model__position_ids=np.arange(7)), said=("'model.position_ids'", "no row takes it")
    ),
    "a prefix of DataParallel": Bad(
        under("module."),
        said=("1 problem", "torch.nn.DataParallel put it before 21 of 21", "--strip module."),
    ),
    "a prefix of torch.compile": Bad(
        under("_orig_mod."), said=("1 problem", "torch.compile", "--strip _orig_mod.")
    ),
    "prefixes of both": Bad(under("module._orig_mod."), said=("--strip module._orig_mod.",)),
    "a prefix that is not there": Bad(
        options=("--strip", "modle"), said=("'modle.'", "got none", "nearest: model.")
    ),
    "two keys that become one": Bad(
        lambda held: held | {f"module.{Q}": held[Q]},
        ("--strip", "module"),
        said=("doubly written", f"'module.{Q}' are both there"),
    ),
    "a wrong shape": Bad(
        lambda held: held | {Q: held[Q][:-1]}, said=("wrong shape", Q, "multiple of head_dim = 5")
    ),
    "a weight of one head less": Bad(
        lambda held: held | {KEY: held[KEY][:-H]}, said=(KEY, "expected 3 heads", "got 2")
    ),
    "some biases only": Bad(
        biases("q"),
        config={"attention_bias": True},
        said=("layers.0.attention.k_proj.bias", "layers.1.attention.v_proj.bias", "missing"),
    ),
    "biases that the config has not": Bad(
        biases("q", "k", "v"), said=("unexpected", "q_proj.bias", "as the config has it")
    ),
    "other heads than the config's": Bad(
        options=("--num-heads", "5"), said=("--num-heads", "expected 6", "got 5")
    ),
    "a config of other heads": Bad(
        config={"num_attention_heads": 3}, said=("expected 3 heads of head_dim = 5, got 6",)
    ),
    "a config of no numbers": Bad(
        config={"num_attention_heads": "six"}, said=("num_attention_heads", "got 'six'")
    ),
    "a config of another width": Bad(
        config={"hidden_size": 10**12}, said=(Q, f"expected {10**12} features", "got 31")
    ),
    "a config of scalings that are none": Bad(
        config={"rope_scaling": "linear"}, said=("rope_scaling", "a JSON object, got 'linear'")
    ),
    "a config of a scaling without a name": Bad(
        config={"rope_scaling": {"rope_type": [1]}}, said=("rope_type", "got [1]")
    ),
    "a config of a number that no float holds": Bad(
        config={"rope_theta": 10**400}, said=("rope_theta", "a number above 0")
    ),
    "a config of endless layers": Bad(
        config={"num_hidden_layers": 10**12}, said=(f"expected attention in {10**12} layers",)
    ),
    "a config of layers that are no number": Bad(
        config={"num_hidden_layers": True}, said=("num_hidden_layers", "got True")
    ),
    "more layers than the config has": Bad(
        config={"num_hidden_layers": 1}, said=("unexpected", "in 1 layers", "got it in [1]")
    ),
    "a layer far beyond the others": Bad(
        lambda held: held | {Q.replace("1", "999999999"): held[Q]},
        said=("expected layers 0 to 999999999", "[2, 3, 4, 5, 6, 7, 8, 9]"),
    ),
    "a layer of 5,000 digits": Bad(
        lambda held: held | {Q.replace("1", "9" * 5000): held[Q]}, said=("no row takes it",)
    ),
    "a family that is not known": Bad(
        config={"model_type": "mine"}, said=("'mine'", "--layout package.module:TABLE", "llama")
    ),
    "NaN": Bad(
        holding(Q, np.nan, np.nan, np.inf), said=("not finite", Q, "2 NaN and 1 infinite of 930")
    ),
    "numbers that float32 rounds": Bad(
        options=("--dtype", "float32"),
        said=("wrong dtype", Q, "930 of 930 change", "--lossy"),
        dtype="float64",
    ),
    "bfloat16 beyond float16": Bad(
        holding(Q, 1e30, -1e30),
        ("--dtype", "float16"),
        said=(Q, "2 of them to infinity", "--lossy"),
        dtype="bfloat16",
    ),
    "a tensor of no heads": Bad(
        lambda held: held | {KEY: held[KEY][:0]}, said=(KEY, "expected 3 heads", "got 0")
    ),
    "a pattern that meets nothing": Bad(
        options=("--ignore", "*.position_ids"), said=("'*.position_ids'", "none is so")
    ),
    "everything at once": Bad(
        lambda held: having(model__stray=np.ones(3, "f4"))(holding(Q, np.nan)(without(KEY)(held))),
        ("--ignore", "none", "--num-kv-heads", "2"),
        said=("'model.stray'", "'none'", "--num-kv-heads", "1 NaN", KEY),
    ),
}


def ported(source, target, *options):
    return CliRunner().invoke(main, ["port", *map(str, (source, target, "--to", "flax", *options))])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_mapping_is_one_message_and_nothing_written(tmp_path, name):
    bad = BAD[name]
    (tmp_path / "source").mkdir()
    source = saved(tmp_path / "source", bad.change(llama(bad.dtype)), CONFIG | bad.config)
    done = ported(source, tmp_path / "flax", *bad.options)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)  # no traceback
    message = " ".join(done.stderr.split())
    assert message.count("Error: ") == 1
    for word in bad.said:
        assert word in message
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


GOOD = {
    "as it is": Bad(),
    "stripped when asked to": Bad(under("module."), ("--strip", "module")),
    "a buffer passed over": Bad(
        having(model__position_ids=np.arange(7)), ("--ignore", "*.position_ids")
    ),
    "NaN when allowed": Bad(holding(Q, np.nan), ("--allow-nonfinite",)),
    "lossy when asked to": Bad(
        holding(Q, 1e30), ("--dtype", "float16", "--lossy"), dtype="bfloat16"
    ),
    "float64 that float32 holds": Bad(
        lambda held: {k: a.astype("float32").astype("float64") for k, a in held.items()},
        ("--dtype", "float32"),
        dtype="float64",
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_the_same_is_carried_when_that_is_asked_for(tmp_path, name):
    good = GOOD[name]
    (tmp_path / "source").mkdir()
    source = saved(tmp_path / "source", good.change(llama(good.dtype)), CONFIG)
    done = ported(source, tmp_path / "flax", *good.options)
    assert done.exit_code == 0, done.output
    assert len(load_checkpoint(tmp_path / "flax")) == 21


TARGETS = {
    "that is there": (lambda f: f / "there", "nothing is written over"),
    "in no folder": (lambda f: f / "gone" / "flax", "there is none"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_refused(tmp_path, name):
    make, said = TARGETS[name]
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    (tmp_path / "source").mkdir()
    done = ported(saved(tmp_path / "source", llama(), CONFIG), make(tmp_path))
    assert done.exit_code == 2
    assert said in done.stderr
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"there", "source"}


def test_a_disk_that_refuses_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    (tmp_path / "source").mkdir()
    source = saved(tmp_path / "source", llama(), CONFIG)
    monkeypatch.setattr(os, "fsync", full)
    done = ported(source, tmp_path / "flax")
    assert done.exit_code == 2
    assert "No space left on device" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_read_only_is_refused(tmp_path, monkeypatch):
    (tmp_path / "source").mkdir()
    source = saved(tmp_path / "source", llama(), CONFIG)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # root may write
    done = ported(source, tmp_path / "flax")
    assert done.exit_code == 2
    assert "read-only" in done.stderr


def test_a_record_that_is_none_is_an_error(tmp_path):
    (tmp_path / "source").mkdir()
    ported(saved(tmp_path / "source", llama(), CONFIG), tmp_path / "flax")
    (tmp_path / "flax" / "port.json").write_text('{"keys": [1]}')
    arguments = ["port", str(tmp_path / "flax"), str(tmp_path / "back"), "--to", "torch"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert "expected the record of a port" in done.stderr
    assert not (tmp_path / "back").exists()


USAGE = {
    "no colon": (("--layout", "json"), "expected package.module:TABLE"),
    "no such module": (("--layout", "no_such_module:X"), "does not import"),
    "a module that leaves": (("--layout", "leaves_at_once:X"), "SystemExit: 0"),
    "no table": (("--layout", "jax_attn.transfer.layouts:LINAER"), "nearest: LINEAR"),
    "lossy alone": (("--lossy",), "--lossy goes with --dtype"),
    "no source": ((), "none there"),
    "a source of no possible name": ((), "none there"),
}


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_names_the_option(tmp_path, monkeypatch, name):
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.chdir(tmp_path)
    options, said = USAGE[name]
    sources = {"no source": "gone", "a source of no possible name": "a" * 300}
    source = tmp_path / sources.get(name, "")
    done = ported(source, tmp_path / "flax", *options)
    assert done.exit_code == 2
    assert said in done.stderr


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
    port = plan_port(held, Table(layout, Sizes(N, K, H)), "flax")
    assert any(said in str(problem) for problem in port.problems), port.problems


def test_parts_of_two_dtypes_are_no_packed_tensor():
    paths = ["q_proj.kernel", "k_proj.kernel", "v_proj.kernel"]
    layout = Layout(row("qkv.weight", paths, packed, linear, heads))
    held = {path: np.ones((D, K, H), "f4") for path in paths} | {paths[1]: np.ones((D, K, H), "f8")}
    (problem,) = plan_port(held, Table(layout, Sizes(K, K, H)), "torch").problems
    assert (problem.kind, problem.hint) == ("wrong dtype", "--dtype casts them")


def test_heads_that_nobody_names_are_asked_for():
    (problem,) = plan_port(HELD, Table(attention(), None), "flax").problems
    assert "--num-heads" in problem.hint


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
    table = Table(layout, rng.choice([Sizes(N, K, H)] * 4 + [None, Sizes(3, 1, 2)]))
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
