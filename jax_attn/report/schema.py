"""The schema of the JSON documents about checks: every key, its type and its meaning.

A type is written as "string", "number", "integer", "boolean", "any", or the name of an object of
`OBJECTS`; "list of T" and "map of T" (by name) hold values of type T, and "T or null" may be null.
"""

from typing import NamedTuple

CHECK, RUN = "jax-attn.check/1", "jax-attn.run/1"
"""The value of `schema` in a document of one check, and in one of a run of checks."""


class Key(NamedTuple):
    """A key of an object. is_optional: whether an object may lack it."""

    type: str
    meaning: str
    is_optional: bool = False


_SCHEMA = "names this schema and its version; the version grows if a key changes or goes"
_ENVIRONMENT = Key("environment", "versions, devices and settings")

RESULT = {
    "name": Key("string", "the name of the check"),
    "steps": Key("string", "of a training: the number of updates", True),
    "dtype": Key("string", "the dtype of both modules"),
    "backend": Key("string", "the platform that the port ran on"),
    "level": Key("string", "`measured`, `interpreted`, `emulated` or `not run`"),
    "verdict": Key("string", "`PASS`, `FAIL` or `INCONCLUSIVE`"),
    "reasons": Key("list of string", "every reason why the verdict is not `PASS`"),
    "notes": Key("list of string", "what was not compared, and what else a reader should know"),
    "findings": Key("list of finding", "the same reasons and notes with kind and weight"),
    "explanation": Key("explanation", "if it was asked for and the verdict is not PASS", True),
    "tensors": Key(
        "map of tensor",
        "every compared tensor, by its label; if several transforms were run, after its transform",
    ),
}
OBJECTS = {
    "check": {
        "schema": Key("string", f"`{CHECK}`; {_SCHEMA}"),
        **RESULT,
        "next": Key("list of step", "what to do next; empty after `PASS`"),
        "environment": _ENVIRONMENT,
    },
    "run": {
        "schema": Key("string", f"`{RUN}`; {_SCHEMA}"),
        "environment": _ENVIRONMENT,
        "complete": Key("boolean", "false if the run was interrupted"),
        "summary": Key("map of any", "counts of verdicts, and errors compared with torch's"),
        "cases": Key("list of result", "the results, one per check"),
        "compiled": Key("list of any", "programs that were compiled or refused but not run"),
    },
    "result": RESULT,
    "finding": {
        "weight": Key("string", "`failure`, `doubt`, `note` or `standing note`"),
        "kind": Key("string", "a word for programs, which stays when sentences are reworded"),
        "sentence": Key("string", "the finding in words"),
    },
    "tensor": {
        "kind": Key("string", "`output`, `gradient of input`, `gradient of parameter` and so on"),
        "name": Key("string", "the name of the output, input or parameter"),
        "transform": Key("string", "how the port was run: `eager`, `jit` and so on"),
        "verdict": Key("string", "the verdict on this tensor"),
        "reasons": Key("list of string", "why it is not `PASS`"),
        "shape": Key("list of integer", "its shape"),
        "fraction": Key("number or null", "the largest error over its budget; above 1 fails"),
        "error": Key("number or null", "the port's RMS error against the float64 oracle"),
        "reference_error": Key("number or null", "torch's own RMS error"),
        "ratio": Key("number or null", "`error` over `reference_error`"),
        "scale": Key("number or null", "the oracle's RMS"),
        "budget": Key("number or null", "the largest RMS error that passes"),
        "index": Key("list of integer", "the element with the largest error over its budget"),
        "got": Key("number or null", "the port's number there"),
        "want": Key("number or null", "the oracle's number there"),
        "allowed": Key("number or null", "the largest error that passes there"),
        "projection": Key("number or null", "the systematic part of the error over its budget"),
    },
    "explanation": {
        "verdict": Key("string", "the verdict that is explained"),
        "sentence": Key("string", "the finding in one sentence"),
        "stopped": Key("string", "why the search ended early, as `interrupted`; else empty"),
        "regions": Key("list of region", "the wrong places, in the order of computation"),
        "text": Key("string", "the whole explanation as text"),
        "first_wrong": Key("tensor or null", "of a training: its first wrong tensor", True),
        "causes": Key("list of cause of training", "of a training: causes of wrong updates", True),
    },
    "region": {
        "last_matched": Key("list of place pair", "the right tensors before the wrong one"),
        "first_wrong": Key("place pair", "the first wrong tensor, and the reference's for it"),
        "worst": Key("element", "the element of it that differs most"),
        "equations": Key("list of place", "the port's operations from the right tensors to it"),
        "where": Key("list of string", "on which part of an axis it is wrong, if not everywhere"),
        "again": Key("list of place pair", "further places with the same error, as in each layer"),
        "causes": Key("list of cause", "bugs that were planted in the reference and explain it"),
        "repro": Key("string", "a script that shows the difference alone; may be empty"),
    },
    "place pair": {
        "ours": Key("place", "the port's tensor"),
        "theirs": Key("place", "the reference's tensor"),
    },
    "place": {
        "op": Key("string", "the operation, such as `dot_general` or `aten.bmm`"),
        "shape": Key("list of integer", "the shape of its result"),
        "module": Key("string", "the path of its module; empty if unknown"),
        "source": Key("string", "its line, such as `port.py:12`; empty if unknown"),
        "is_backward": Key("boolean", "whether it belongs to the backward pass"),
    },
    "element": {
        "index": Key("list of integer", "its index"),
        "got": Key("number or null", "the port's number"),
        "expected": Key("number or null", "the reference's number"),
    },
    "cause": {
        "name": Key("string", "a name that begins with the field's word: `scale`, `epsilon`"),
        "sentence": Key("string", "the cause in one sentence"),
        "site": Key("place", "the operation of the reference in which the bug was planted"),
        "value": Key("any", "the number that was found, or its name; null if there is none"),
        "confirmed": Key("boolean", "whether the changed reference computes the port's numbers"),
        "explained": Key("number", "the share of the error that the change removes, from 0 to 1"),
    },
    "cause of training": {
        "kind": Key("string", "a word that begins with `recipe`"),
        "sentence": Key("string", "the cause in words"),
    },
    "step": {
        "change": Key(
            "string",
            "what to change: `inputs`, `reference`, `pair`, `weights`, `port`; or `nothing`, for a "
            "command that only finds out more",
        ),
        "sentence": Key("string", "the step in words, with the command or the function to call"),
    },
    "environment": {
        "python": Key("string", "Python's version"),
        "packages": Key("map of string", "versions of the packages that decide numbers"),
        "platform": Key("string", "the operating system"),
        "processor": Key("string", "the processor, and its widest vector instructions"),
        "cores": Key("integer", "the number of cores"),
        "devices": Key("list of string", "JAX's devices"),
        "jax_default_matmul_precision": Key("any", "JAX's setting"),
        "jax_enable_x64": Key("any", "JAX's setting"),
        "xla_flags": Key("string", "XLA's flags"),
    },
}


def tables() -> str:
    """Return a Markdown section, with a table, for each object, as the documentation shows it."""
    sections = []
    for name, keys in OBJECTS.items():
        rows = [
            f"| `{key}` | {it.type}{', may be absent' if it.is_optional else ''} | {it.meaning} |"
            for key, it in keys.items()
        ]
        sections += [f"## {name}", "", "| key | type | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(sections).rstrip()
