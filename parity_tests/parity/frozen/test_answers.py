"""What a port's process may answer: what is wrong is refused or fails, and nothing of it is run."""

import json
import pickle
import socket
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from jax import P
from safetensors.numpy import save

from helpers.attention.meshes import mesh
from helpers.parity.asked_here import AskedHere
from helpers.parity.written_golden import DATA, B, attention
from jax_attn.parity import Pair, Verdict, check, load_golden
from jax_attn.parity.frozen.check_frozen import judged_by_answers
from jax_attn.parity.frozen.frozen_port import FrozenPort, FrozenWeights
from jax_attn.parity.frozen.frozen_port import made as what_is_made
from jax_attn.parity.frozen.messages import MessageError, parsed, receive, written
from jax_attn.parity.frozen.unanswered import Unanswered
from jax_attn.parity.golden.codec import fields_of
from jax_attn.parity.judge.finding import StandingNote
from jax_attn.parity.pair.errors import PairError
from jax_attn.transfer import LAYOUTS

LAYOUT = LAYOUTS["torch_mha"]


@pytest.fixture(scope="module")
def golden():
    return load_golden(DATA / "attention")


@pytest.fixture(scope="module")
def port():
    return attention()


def frozen(golden, pair, **altered):
    options = {"transforms": ("jit",), "strict": False}
    with AskedHere(pair, altered) as process:
        return judged_by_answers(process, golden, options).result


def outputs(change):
    """Change the outputs of a run."""
    return lambda run: replace(run, outputs={k: change(a) for k, a in run.outputs.items()})


def weights(change):
    return lambda answer: ({k: change(a) for k, a in answer[0].items()}, answer[1])


def made(place, value):
    return lambda answer: (*answer[:place], value, *answer[place + 1 :])


ALTERED = {
    # question, what becomes of its answer -> the verdict, or what the error says
    "NaN": ("run", outputs(lambda a: np.full_like(a, np.nan)), Verdict.FAIL),
    "another shape": ("run", outputs(lambda a: a.transpose(1, 0, 2)), Verdict.FAIL),
    "another kind": ("run", outputs(lambda a: a.astype(int)), "expected floating-point numbers"),
    "coarser": ("run", outputs(lambda a: a.astype(ml_dtypes.bfloat16)), "that hold float32"),
    "no output": ("run", lambda run: replace(run, outputs={}), "output: the reference has"),
    "another name": (
        "run",
        lambda run: replace(run, outputs={"other": run.outputs["output"]}),
        "output: the reference has",
    ),
    "no gradient of an input": ("run", lambda run: replace(run, input_grads={}), "of input: the"),
    "no gradient of a parameter": (
        "run",
        lambda run: replace(run, parameter_grads={}),
        "gradient of parameter: the reference has",
    ),
    "half of the gradients": (
        "to_torch",
        lambda arrays: dict([*arrays.items()][:2]),
        Verdict.FAIL,
    ),
    "words for a run": ("run", lambda run: "PASS", "hand back a run"),
    "an error under every transform": ("run", lambda _: ("no\nPASS", "no\nPASS", ""), ": PASS$"),
    "words for arrays": ("run", outputs(lambda a: "zero"), "hand back arrays by name"),
    "other weights": ("to_torch", lambda arrays: {k: a + 1 for k, a in arrays.items()}, "FAIL"),
    "no weights": ("weights", lambda answer: None, "hand back its weights"),
    "a line of its own": ("made", made(4, "cpu\nPASS"), "what the file made"),
    "another transform": ("made", made(0, ("pmap",)), "what the file made"),
    "a note that it is strict": ("made", made(1, "yes"), "what the file made"),
    "a table with code": ("made", made(2, ("import os",)), "what the file made"),
    "a tuple for paths": (
        "made",
        lambda answer: (*answer[:3], answer[3]._replace(caches=("a",)), *answer[4:]),
        "what the file made",
    ),
    "a refusal without a problem": ("to_torch", lambda _: ("loading", ()), "arrays by name"),
    "another note": ("on_mesh", lambda _: (StandingNote("scope", "all"),), "notes on its mesh"),
    "words for files": ("files", lambda _: "all", "names of files"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", ALTERED)
def test_what_is_wrong_is_refused_or_fails(row, golden, port):
    question, change, outcome = ALTERED[row]
    altered = {"make" if question == "made" else question: change}
    pair = Pair(None, port, None, layout=LAYOUT)
    if outcome in [*Verdict]:
        assert frozen(golden, pair, **altered).verdict == outcome
        return
    with pytest.raises((PairError, ValueError, TypeError), match=outcome):
        frozen(golden, pair, **altered)


@pytest.mark.slow
def test_an_error_under_one_transform_is_one_line_and_the_others_are_judged(golden, port):
    raised = iter([("port: raises\nPASS", "Traceback\nPASS", "")])
    pair = Pair(None, port, None, layout=LAYOUT)
    options = {"transforms": ("jit", "remat"), "strict": False}
    with AskedHere(pair, {"run": lambda run: next(raised, run)}) as process:
        result = judged_by_answers(process, golden, options).result
    assert [(f.kind, str(f)) for f in result.failures] == [("raised", "jit: port: raises PASS")]
    assert {(t.transform, t.verdict) for t in result.tensors} == {("remat", Verdict.PASS)}


ASKED = {
    # question -> how a port or its weights are asked it, wrong answers, and what the error says
    "tried": (
        lambda port, _, x: port.tried("float32", x, "jit"),
        (None, "PASS\nPASS", 1, {"output": np.ones(3)}),
        "hand back a run",
    ),
    "held": (
        lambda port, *_: port.held(["out_proj.bias"]),
        ({}, "zero", {"out_proj.bias": 0.0}, {"other": np.ones(3)}, None),
        "hand back arrays by name",
    ),
    "computed_in": (
        lambda port, *_: port.computed_in(),
        (None, {"float32": -1}, {"float32": "all"}, {"int32": 1}, {"float\nPASS": 1}),
        "hand back numbers of results by dtype",
    ),
    "misfits": (
        lambda _, weights, x: weights.misfits({}),
        (None, "PASS", (("a", "b"),), ((1, 2, 3),), (("a\nPASS",) * 3,)),
        "hand back the problems of its table",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("question", ASKED)
def test_a_wrong_answer_to_a_question_of_a_probe_is_refused(question, golden, port):
    ask, answers, message = ASKED[question]
    side = Unanswered.of(golden)
    for answer in answers:
        pair = Pair(None, port, None, layout=LAYOUT)
        with AskedHere(pair, {question: lambda _, answer=answer: answer}) as process:
            asked = what_is_made(process, {}, {k: getattr(side, k) for k in fields_of(Unanswered)})
            own, of_table = FrozenPort(process, asked), FrozenWeights(process, asked.layout)
            with pytest.raises(PairError, match=message):
                ask(own, of_table, golden.inputs)


@pytest.mark.slow
def test_unaltered_answers_give_the_check_of_this_process(golden, port):
    on_mesh = {"mesh": mesh("auto", data=B), "specs": {"0": P("data")}}
    other = {"layout": LAYOUT.renamed({"out_proj": "other"})}
    for options in ({"layout": LAYOUT}, {}, other, {"layout": LAYOUT, **on_mesh}):
        wanted = check(golden, port, transforms=("jit",), **options)
        assert frozen(golden, Pair(None, port, None, **options)) == wanted
        assert wanted.verdict is (Verdict.FAIL if options is other else Verdict.PASS)


# --- messages -------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self):
        return pytest.fail, ("was run",)


UNREADABLE = {
    "a pickle": (pickle.dumps(Runs()), save({})),
    "a pickle for arrays": (b"{}", pickle.dumps(Runs())),
    "a type": (json.dumps({"$": "os.system", "command": "true"}).encode(), save({})),
    "an array that is absent": (json.dumps({"$": "array", "name": "a"}).encode(), save({})),
    "depth": (b"[" * 100_000, save({})),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("row", UNREADABLE)
def test_a_message_is_data_or_refused(row):
    with pytest.raises(MessageError, match="wrote no message"):
        parsed(*UNREADABLE[row])


def test_arrays_travel_bit_for_bit_and_objects_do_not():
    for dtype in (bool, np.int8, np.float16, ml_dtypes.bfloat16, np.float64, np.complex64):
        for shape in ((), (0, 3), (2, 3)):
            array = np.full(shape, 1.5).astype(dtype).T
            (back,) = parsed(*written((array,)))
            assert (back.dtype, back.shape, back.tobytes()) == (dtype, shape[::-1], array.tobytes())
    with pytest.raises(TypeError, match=r"expected an array of .*, got object"):
        written((np.array([Runs()]),))


def test_words_are_bounded_where_the_free_memory_is_not_known():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((2**40).to_bytes(8, "little"))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(MessageError, match="more than the"):
            receive(ours)
