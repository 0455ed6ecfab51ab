"""Texts that grow: of each turn only what is new is read, and the tokens are the same."""

import jax
import numpy as np
import pytest
import torch

from helpers.families.whole_models import made
from jax_attn import models
from jax_attn.attention.checks import ArgumentError
from jax_attn.models import generate

pytestmark = pytest.mark.filterwarnings("error")
B, NEW, V, ROOM = 2, 4, 41, 47
TEXT = np.random.default_rng(0).integers(3, V, (B, ROOM)).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def pair(request, tmp_path_factory):
    with jax.enable_x64(True):
        theirs, folder = made(request.param).double(), tmp_path_factory.mktemp("model")
        theirs.save_pretrained(folder)
        return theirs, models.load(folder)


@pytest.fixture
def model(pair):
    return pair[1]


def padded(rows, *, left=False):
    """(tokens, lengths, mask) of rows of several lengths."""
    T = max(map(len, rows))
    tokens, mask = np.zeros((2, len(rows), T), np.int32)
    for b, row in enumerate(rows):
        at = slice(T - len(row), T) if left else slice(len(row))
        tokens[b, at], mask[b, at] = row, 1
    return tokens, mask.sum(axis=1).astype(np.int32), mask


def test_padding_in_front_changes_no_token(pair):
    """Of transformers' generate neither."""
    theirs, model = pair
    rows = [TEXT[0, :7], TEXT[1, :3]]
    tokens, lengths, _ = padded(rows)
    wanted = model.generate(tokens, lengths, NEW, eos_token_id=()).tolist()
    tokens, _, mask = padded(rows, left=True)
    assert (
        model.generate(tokens, None, NEW, attention_mask=mask, eos_token_id=()).tolist() == wanted
    )
    given = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW}
    given["attention_mask"] = torch.tensor(mask)
    for penalty in (1.0, 2.0):
        how = {"eos_token_id": (), "repetition_penalty": penalty}
        wanted = model.generate(tokens, None, NEW, attention_mask=mask, **how).tolist()
        given["repetition_penalty"] = penalty
        found = theirs.generate(torch.tensor(tokens, dtype=torch.int64), **given)
        assert found[:, tokens.shape[1] :].tolist() == wanted


@pytest.mark.parametrize("every", [1, 3, 9])
def test_a_stream_has_the_tokens_of_generate(every, model):
    tokens, lengths, _ = padded([TEXT[0, :7], TEXT[1, :3]])
    whole = np.asarray(model.generate(tokens, lengths, 8, eos_token_id=()))
    pieces = [*model.stream(tokens, lengths, 8, every=every, eos_token_id=())]
    assert [p.shape[1] for p in pieces][:-1] == [every] * ((8 - 1) // every)
    assert (np.concatenate(pieces, axis=1) == whole).all()


def test_a_stream_ends_with_its_rows(model):
    tokens, lengths, _ = padded([TEXT[0, :7], TEXT[1, :3]])
    whole = np.asarray(model.generate(tokens, lengths, 8, eos_token_id=()))
    ends = (int(whole[0, 1]), int(whole[1, 2]))
    pieces = [*model.stream(tokens, lengths, 8, every=2, eos_token_id=ends)]
    found, wanted = (
        np.concatenate(pieces, axis=1),
        model.generate(tokens, lengths, 8, eos_token_id=ends),
    )
    assert found.shape[1] < 8
    assert (found == np.asarray(wanted)[:, : found.shape[1]]).all()


@pytest.fixture
def reads(monkeypatch):
    """The lengths of every prompt that is read."""
    lengths, begun = [], generate.begun
    monkeypatch.setattr(
        generate,
        "begun",
        lambda model, wanted, prompt, *rest, **more: (
            lengths.append(np.asarray(prompt.lengths).tolist())
            or begun(model, wanted, prompt, *rest, **more)
        ),
    )
    return lengths


def turn(chat, rows, reads, count=NEW, **how):
    """What a chat says, after a look at what it should."""
    tokens, lengths, _ = padded(rows)
    how = {"eos_token_id": ()} | how
    found = np.asarray(chat.generate(tokens, lengths, count, **how))
    read = reads.pop()
    wanted = chat.model.generate(tokens, lengths, count, **how)
    assert (found == np.asarray(wanted)).all()
    reads.pop()
    return found, read


def test_a_turn_reads_what_is_new(model, reads):
    """It is the last token of the turn before, which nothing read, and all that follows."""
    chat, rows = models.Chat(model, B, ROOM), [TEXT[0, :5], TEXT[1, :3]]
    said, read = turn(chat, rows, reads)
    assert read == [5, 3]
    assert [len(row) for row in chat.read] == [8, 6]
    rows = [np.concatenate([*pair, [7] * n]) for *pair, n in zip(rows, said, (2, 4), strict=True)]
    _, read = turn(chat, rows, reads)
    assert read == [3, 5]
    numbers = {"temperature": 0.8, "repetition_penalty": 1.5, "key": jax.random.key(0)}
    _, read = turn(chat, rows, reads, **numbers)
    assert read == [1, 1]


@pytest.mark.slow
def test_a_row_that_has_ended_goes_on_from_its_end(model, reads):
    chat, rows = models.Chat(model, B, ROOM), [TEXT[0, :5], TEXT[1, :3]]
    said, _ = turn(models.Chat(model, B, ROOM), rows, reads)
    end = int(said[0, 1])
    said, _ = turn(chat, rows, reads, eos_token_id=end)
    count = 1 + said[0].tolist().index(end)
    read = chat.read[0][len(rows[0]) :].tolist()
    assert count <= len(read)
    assert read == said[0, : len(read)].tolist()
    texts = [np.append(rows[0], said[0, :count]), np.append(rows[1], said[1])]
    _, read = turn(chat, [np.append(text, 9) for text in texts], reads)
    assert read[0] == 1


def test_texts_that_part_are_read_from_there(model, reads):
    chat, other = models.Chat(model, B, ROOM), TEXT.copy()
    other[0, 6] += 1
    turn(chat, [TEXT[0, :11], TEXT[1, :3]], reads)
    _, read = turn(chat, [other[0, :9], TEXT[1, :3]], reads)
    assert read == [3, 1]


@pytest.mark.slow
def test_a_ring_goes_on_or_begins_again(tmp_path, reads):
    with jax.enable_x64(True):
        made("mistral").double().save_pretrained(tmp_path)
        model = models.load(tmp_path)
        chat, rows = models.Chat(model, B, ROOM), [TEXT[0, :11], TEXT[1, :3]]
        said, _ = turn(chat, rows, reads)
        rows = [np.append(*pair) for pair in zip(rows, said, strict=True)]
        rows[1] = TEXT[1, :5]
        _, read = turn(chat, rows, reads)
        assert read == [1, 5]


def test_a_stream_that_is_left_keeps_what_was_asked_for(model, reads):
    chat, rows = models.Chat(model, B, ROOM), [TEXT[0, :5], TEXT[1, :5]]
    stream = chat.stream(np.stack(rows), None, 9, every=2, eos_token_id=())
    said = np.concatenate([next(stream), next(stream)], axis=1)
    stream.close()
    reads.clear()
    _, read = turn(chat, [np.append(*pair) for pair in zip(rows, said, strict=True)], reads)
    assert read == [1, 1]


def test_a_stream_ends_where_another_turn_begins(model):
    chat = models.Chat(model, B, ROOM)
    how = {"every": 2, "eos_token_id": ()}
    first, second = (chat.stream(TEXT[:, :n], None, 6, **how) for n in (5, 7))
    pieces = [next(first), next(second)]
    with pytest.raises(ArgumentError, match="expected one turn after the other"):
        next(first)
    pieces += [*second]
    wanted = model.generate(TEXT[:, :7], None, 6, eos_token_id=())
    assert (np.concatenate(pieces[1:], axis=1) == np.asarray(wanted)).all()
    for _ in chat.stream(TEXT[:, :5], None, 2, **how):  # its last piece: nothing is left to take
        chat.generate(TEXT[:, :7], None, 2, eos_token_id=())


def test_a_stream_whose_rows_end_keeps_the_cache(model, reads):
    chat, text = models.Chat(model, B, ROOM), TEXT[:, :5]
    whole = np.asarray(model.generate(text, None, 9, eos_token_id=()))
    ends = (int(whole[0, 2]), int(whole[1, 1]))
    pieces = [*chat.stream(text, None, 9, every=2, eos_token_id=ends)]
    assert len(pieces) < 5
    said = np.concatenate(pieces, axis=1)
    reads.clear()
    counts = 1 + np.isin(said, ends).argmax(axis=1)
    rows = [np.append(row, new[:n]) for row, new, n in zip(text, said, counts, strict=True)]
    _, read = turn(chat, rows, reads)
    assert read == [1, 1]


@pytest.mark.slow
def test_rows_of_which_one_is_new_reach_the_end_of_the_table(tmp_path, reads):
    """Padding behind the row that is nearly full lies behind the table of 23 positions."""
    with jax.enable_x64(True):
        made("gpt2").double().save_pretrained(tmp_path)
        chat = models.Chat(models.load(tmp_path), B, 23)
        tokens, lengths, _ = padded([TEXT[0, :18], TEXT[1, :3]])
        chat.generate(tokens, lengths, 1, eos_token_id=())
        _, read = turn(chat, [TEXT[0, :20], TEXT[1, 4:23]], reads, count=2)
        assert read == [2, 19]


@pytest.mark.slow
def test_streams_run_where_ranks_may_not_be_promoted(model):
    """They do so after the call that made them, which allows it, has returned."""
    with jax.numpy_rank_promotion("raise"):
        for maker in (model, models.Chat(model, B, ROOM)):
            stream = maker.stream(TEXT[:, :5], None, 5, every=2, repetition_penalty=1.1)
            assert sum(piece.shape[1] for piece in stream) <= 5


def test_a_turn_that_fails_leaves_an_empty_cache(model, reads, monkeypatch):
    """Its last step was given the cache, and may have written to it."""
    chat = models.Chat(model, B, ROOM)
    stream = chat.stream(TEXT[:, :5], None, 9, every=2, eos_token_id=())
    next(stream)
    with monkeypatch.context() as patched:
        patched.setattr(generate, "gone_on", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(stream)
    reads.clear()
    _, read = turn(chat, [TEXT[0, :5], TEXT[1, :5]], reads)
    assert read == [5, 5]


REFUSED = {
    "another number of rows": ((TEXT[:1, :5], None, NEW), "tokens: expected 2 rows, got 1"),
    "more than fits": (
        (TEXT[:, :17], None, 3),
        "max_new_tokens: expected at most 1 after 17 tokens, got 3",
    ),
    "a text that does not fit": (
        (TEXT[:, :19], None, 3),
        "tokens: expected at most 17 in a row, got 19",
    ),
    "all at once": (
        (TEXT[:1, :5], None, 0),
        "(?s)max_new_tokens: expected an int ≥ 1, got int 0.*tokens: expected 2 rows, got 1",
    ),
    "no text": ((TEXT[:, :0], None, NEW), "tokens: expected"),
    "a mask with gaps": (
        (TEXT[:, :3], None, NEW, np.array([[1, 0, 1], [0, 1, 1]])),
        "attention_mask: expected the tokens of a row one behind the other, got gaps in rows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name(name, model):
    (tokens, lengths, count, *mask), says = REFUSED[name]
    mask = mask[0] if mask else None
    with pytest.raises(ArgumentError, match=says):
        models.Chat(model, B, 17).generate(tokens, lengths, count, attention_mask=mask)


def test_every_of_0_is_refused_before_anything_is_asked_for(model):
    with pytest.raises(ArgumentError, match="every: expected an int ≥ 1"):
        model.stream(TEXT, None, NEW, every=0)
    with pytest.raises(ArgumentError, match="batch: expected an int ≥ 1"):
        models.Chat(model, 0)


@pytest.mark.slow
def test_what_is_unknown_under_jit_is_refused_by_name(model):
    known = "tokens: expected known values"
    with pytest.raises(ArgumentError, match=f"Model.stream: {known}"):
        jax.jit(lambda tokens: [*model.stream(tokens, None, NEW)])(TEXT[:, :5])
    with pytest.raises(ArgumentError, match=f"Chat.generate: {known}"):
        jax.jit(lambda tokens: models.Chat(model, B, ROOM).generate(tokens, None, NEW))(TEXT[:, :5])
    with pytest.raises(ArgumentError, match="eos_token_id: expected a token of 0 to 40"):
        jax.jit(lambda end: model.generate(TEXT[:, :5], None, NEW, eos_token_id=end))(3)
    key = jax.random.key(0)
    draw = jax.jit(
        lambda k: model.generate(TEXT[:, :5], None, NEW, temperature=1.0, top_k=k, key=key)
    )
    wanted = model.generate(TEXT[:, :5], None, NEW, temperature=1.0, top_k=3, key=key)
    assert (draw(3) == wanted).all()
