"""`jax-attn generate`: the tokens of `Model.generate`, as text, and turns that go on."""

import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from helpers.families.whole_models import made
from jax_attn import models
from jax_attn.cli import main
from jax_attn.cli.status import Exit

V, NEW = 41, 7
TEMPLATE = (
    "{% for m in messages %}{{ '1' if m.role == 'user' else '2' }} {{ m.content }} {% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def with_encoder(tmp_path_factory):
    return written("mt5", tmp_path_factory.mktemp("mt5"))


def written(name, folder):
    """A model whose tokens are numbers, in a folder with a tokenizer and no ends."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    made(name).save_pretrained(folder)
    (folder / "generation_config.json").write_text("{}")
    words = Tokenizer(kinds.WordLevel({str(n): n for n in range(V)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))

    def run(*options, given=None, status=Exit.PASS, of=folder):
        result = CliRunner().invoke(
            main, ["generate", str(of), *options, "--max-new-tokens", str(NEW)], input=given
        )
        assert result.exit_code == status, result.output
        return result

    return run


def following(folder, numbers, **how):
    model = models.load(folder)
    return np.asarray(model.generate(np.array([numbers]), None, NEW, **how))[0].tolist()


def text(numbers):
    return " ".join(map(str, numbers))


def test_a_prompt_is_continued(run, folder):
    result = run("5 7 11")
    assert result.stdout == f"5 7 11 {text(following(folder, [5, 7, 11]))}\n"
    assert f"{NEW} tokens, the first 4 in" in result.stderr
    assert "a second" in result.stderr


@pytest.mark.slow
def test_no_more_is_generated_than_there_is_room_for(run, folder):
    wanted = following(folder, [5, 7, 11])[:2]
    assert run("5 7 11", "--length", "4").stdout == f"5 7 11 {text(wanted)}\n"


def test_lines_of_stdin_are_texts_of_their_own(run, folder):
    wanted = [f"{text(row)} {text(following(folder, row))}\n" for row in ([5, 7], [5, 9])]
    assert run(given="5 7\n\n5 9\n").stdout == "".join(wanted)


def test_turns_of_a_chat_go_on(run, folder):
    first = following(folder, [1, 5, 7])
    second = following(folder, [1, 5, 7, 2, *first, 1, 9])
    assert run("--chat", given="5 7\n9\n").stdout == f"{text(first)}\n{text(second)}\n"


@pytest.mark.slow
def test_a_seed_draws_and_decides(run):
    options = ("5 7", "--temperature", "2", "--top-k", "30", "--seed")
    assert run(*options, "1").stdout == run(*options, "1").stdout != run(*options, "2").stdout


@pytest.mark.slow
def test_a_source_is_read_and_not_repeated(run, with_encoder):
    """Each line by itself; --length leaves room for as many tokens of the decoder."""
    wanted = [following(with_encoder, row) for row in ([5, 7, 11], [5, 9])]
    lines = "".join(f"{text(row)}\n" for row in wanted)
    assert run(given="5 7 11\n5 9\n", of=with_encoder).stdout == lines
    result = run("5 7 11", "--length", "3", of=with_encoder)
    assert result.stdout == f"{text(wanted[0][:3])}\n"


def test_an_encoder_decoder_has_no_conversation_and_no_longer_source(run, with_encoder):
    result = run("5", "--chat", of=with_encoder, status=Exit.USAGE)
    assert "--chat: expected a decoder's checkpoint, got an encoder-decoder's" in result.stderr
    result = run("5 7 9", "--length", "2", of=with_encoder, status=Exit.USAGE)
    assert "expected at most 2 tokens, got 3" in result.stderr


REFUSED = {
    "a temperature below 0": (("5", "--temperature", "-1"), "'--temperature': -1.0 is not in"),
    "no temperature": (("5", "--temperature", "nan"), "--temperature: expected a number above 0"),
    "a share of 0": (("5", "--top-p", "0"), "'--top-p': 0.0 is not in"),
    "a penalty of 0": (("5", "--repetition-penalty", "0"), "'--repetition-penalty': 0.0 is not in"),
    "top_p alone": (("5", "--top-p", ".5"), "--top-p: expected a temperature beside it"),
    "a share above 1": (("5", "--min-p", "1.5"), "'--min-p': 1.5 is not in"),
    "a text that is too long": (("5 7 9", "--length", "2"), "expected at most 2 tokens, got 3"),
    "an empty text": (("",), "PROMPT: expected a text of at least one token, got ''"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_refused_by_name(name, run):
    options, says = REFUSED[name]
    result = run(*options, status=Exit.USAGE)
    assert says in result.stderr
    assert result.stdout == ""


def test_bytes_that_are_no_text_are_replaced(run):
    assert run(given=b"5 \xff 7\n").stdout.startswith("5 0 7 ")


def test_logits_that_are_no_numbers_are_told(run, folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert "logits are NaN" in run("5 7", of=broken, status=Exit.USAGE).stderr


def test_a_folder_without_a_tokenizer_or_template_is_refused(run, folder, tmp_path):
    bare = tmp_path / "bare"
    made("llama").save_pretrained(bare)
    assert "expected a tokenizer" in run("5", of=bare, status=Exit.USAGE).stderr
    for file in folder.glob("*.json"):
        (bare / file.name).write_text(file.read_text())
    assert "chat template" in run("5", "--chat", of=bare, status=Exit.USAGE).stderr
    (bare / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    assert "no system" in run("5", "--chat", of=bare, status=Exit.USAGE).stderr
    (bare / "tokenizer.json").write_text("{}")
    assert "expected a tokenizer" in run("5", of=bare, status=Exit.USAGE).stderr


def test_a_port_carries_the_file_of_defaults(folder, tmp_path):
    out = tmp_path / "out"
    CliRunner().invoke(main, ["port", str(folder), str(out), "--to", "flax"])
    name = "generation_config.json"
    assert (out / name).read_bytes() == (folder / name).read_bytes()
