"""The pytest plugin's marker: what it hands to the fixture, and wrong marks, told at once."""

import re

import pytest

pytest_plugins = ["pytester"]


def test_each_dtype_is_a_test_and_the_fixture_carries_it(run):
    result = run(
        """
@pytest.mark.parity(dtype=["float32", "bfloat16"])
def test_port(parity, request):
    assert request.node.name == f"test_port[{parity.dtype}]"
    assert parity("PASS", None, ()).dtype == parity.dtype
    assert parity("PASS", None, (), dtype=parity.dtype).dtype == parity.dtype
    with pytest.raises(ValueError, match="dtype: expected the marker's, .*, got 'float16'"):
        parity("PASS", None, (), dtype="float16")
""",
        "-v",
    )
    result.stdout.fnmatch_lines(["*test_port?float32? PASSED*", "*test_port?bfloat16? PASSED*"])
    result.assert_outcomes(passed=2)


def test_the_nearest_word_is_handed_on(run):
    result = run(
        """
pytestmark = pytest.mark.parity(seed=1, gradients=True, transforms=["eager"], strict=True)

@pytest.mark.parity(dtype="bfloat16", seed=2, gradients=False)
def test_port(parity):
    parity("PASS", None, (), seed=3)
    parity("PASS", None, ())

def test_plain():
    pass
""",
        "-s",
    )
    result.assert_outcomes(passed=2)
    others = "'gradients': False, 'transforms': ['eager'], 'strict': True}"
    assert re.findall("called with bfloat16 .*", result.stdout.str()) == [
        f"called with bfloat16 {{'seed': 3, {others}",
        f"called with bfloat16 {{'seed': 2, {others}",
    ]


# the marker's arguments -> what is said of them.
WRONG = {
    "dtpye=['float32']": "unknown keyword 'dtpye': expected some of dtype, gradients, transforms, "
    "seed, strict, parameters; did you mean 'dtype'?",
    "atol=1": "unknown keyword 'atol': expected some of dtype, *, seed, strict, parameters",
    "parameters=['a.*', 3]": "parameters: expected a pattern of *, got ['a.*', 3]",
    "dtype=[]": "dtype: expected one of float32, bfloat16, float16, float64, or a list of some, "
    "each once, got []",
    "dtype='float23'": "dtype: expected one of float32, *got 'float23'",
    "dtype=['float32', 'float32']": "dtype: expected one of *each once, got *",
    "dtype=None": "dtype: expected one of *, got None",
    "gradients='no'": "gradients: expected True or False, got 'no'",
    "strict=1": "strict: expected True or False, got 1",
    "transforms='jit'": "transforms: expected a list of some of eager, jit, *, got 'jit'",
    "transforms=['pmap']": "transforms: expected a list of some of *, got *",
    "seed=-1": "seed: expected an integer, 0 or more, got -1",
    "'float32'": "expected keywords only, got 'float32'",
}


def test_all_wrong_marks_of_a_file_are_told_at_once(run):
    tests = (
        f"@pytest.mark.parity({words})\ndef test_{i}(parity): pass" for i, words in enumerate(WRONG)
    )
    unused = "@pytest.mark.parity(seed=1)\ndef test_unused(): pass"
    result = run("\n".join([*tests, unused]))
    result.assert_outcomes(errors=1)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    problems = (w.replace("[", "?").replace("]", "?") for w in WRONG.values())
    result.stdout.fnmatch_lines(
        [
            "@pytest.mark.parity is used wrongly:",
            *(f"test_it.py::test_{i}: {problem}" for i, problem in enumerate(problems)),
            "test_it.py::test_unused: expected a test that takes the fixture `parity`*",
        ],
        consecutive=True,
    )


def test_marks_on_methods_of_a_unittest_are_looked_at_too(run):
    result = run("""
import unittest

class TestIt(unittest.TestCase):
    @pytest.mark.parity(seed=1)
    def test_unused(self): pass

    @pytest.mark.parity(atol=1)
    def test_wrong(self): pass

@pytest.mark.parity(dtype=["float32", "bfloat16"])
class TestSeveral(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def taken(self, parity):
        self.parity = parity

    def test_several(self): pass

    @pytest.mark.parity(dtype="bfloat16")
    def test_one(self):
        assert self.parity("PASS", None, ()).dtype == "bfloat16"
""")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [
            "*TestIt::test_unused: expected a test that takes the fixture `parity`*",
            "*TestIt::test_wrong: expected a test that takes the fixture `parity`*",
            "*TestIt::test_wrong: unknown keyword 'atol'*",
            "*TestSeveral::test_several: dtype: expected one, because a unittest.TestCase *",
        ]
    )
    result.stdout.no_fnmatch_line("*test_one:*")
