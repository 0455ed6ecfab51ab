"""The time left of a long run: not shown before it is known, then within a factor of the truth."""

import heapq
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.fake_clock import Clock, is_right
from jax_attn import progress
from jax_attn.cli.common.progress import tracked, worked_off
from jax_attn.progress import TimeLeft, counting
from jax_attn.selfcheck import process_pool
from jax_attn.selfcheck.matrix import rows

SECONDS = json.loads(Path(__file__).with_name("verify_seconds.json").read_text())
"""The first row of each piece of work of `jax-attn verify` -> how long it took, two at a time."""
KNOWN_FROM = 0.1


def pieces():
    """The work of `jax-attn verify`, and the seconds that each piece of it took."""
    work = process_pool.tasks(rows.default(), "cpu")
    work += process_pool.tasks(rows.emulated_by_default(), "tpu")
    work += process_pool.compile_tasks((*rows.published(), *rows.COMPILED_KERNELS))
    names = [p.arguments[0] if p.rows == 0 else p.arguments[0][0].name for p in work]
    # A row that was added since takes what it is expected to.
    expected = sum(SECONDS.values()) / sum(piece.cost for piece in work)
    taken = [SECONDS.get(name, expected * p.cost) for p, name in zip(work, names, strict=True)]
    return work, taken


def finished(taken, seed=None, processes=2):
    """[(when it is done, which piece)] where each process takes the next piece that is left.

    seed: of noise in each piece's time, and in when a process is ready; None: of none.
    """
    noise = random.Random(seed)
    spread = 0.0 if seed is None else 0.15
    free = [6.0 + noise.uniform(0, 20 * spread) for _ in range(processes)]
    done = []
    for i, seconds in enumerate(taken):
        start = heapq.heappop(free)
        done.append((start + seconds * noise.lognormvariate(0, spread), i))
        heapq.heappush(free, done[-1][0])
    return sorted(done)


def broken(done, costs, monkeypatch):
    """[(part of the work that is done, what is shown, what is true)] where the promise is broken.

    It is looked at when a piece is done, and just before the next one is.
    """
    clock, left, cost, wrong = Clock(monkeypatch), TimeLeft(sum(costs)), 0.0, []
    end = done[-1][0]
    for (now, i), (later, _) in pairwise(done):
        clock.now, cost = now, cost + costs[i]
        left.done(cost)
        for moment in (now, now + 0.99 * (later - now)):
            clock.now = moment
            part, text = cost / sum(costs), str(left)
            is_kept = text == "" if part < KNOWN_FROM else is_right(text, end - moment)
            wrong += [] if is_kept else [(part, text, end - moment)]
    return wrong


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_the_time_that_verify_has_left_is_right_from_a_tenth_of_the_work_on(seed, monkeypatch):
    work, taken = pieces()
    assert broken(finished(taken, seed), [piece.cost for piece in work], monkeypatch) == []


def test_it_would_not_be_if_all_pieces_cost_alike(monkeypatch):
    _, taken = pieces()
    assert len(broken(finished(taken), len(taken) * [1.0], monkeypatch)) > len(taken) / 2


# name -> (how much longer the first part takes in each process, each part, what it costs).
SEQUENCES = {
    "cold first parts": (55.0, 60 * [5.0], 60 * [1.0]),
    "long parts first": (0.0, [*(40 * [9.0]), *(80 * [3.0])], [*(40 * [3.0]), *(80 * [1.0])]),
    "long parts last": (0.0, [*(80 * [3.0]), *(40 * [9.0])], [*(80 * [1.0]), *(40 * [3.0])]),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("processes", [1, 2])
def test_it_is_right_of_parts_that_differ(name, processes, monkeypatch):
    cold, taken, costs = SEQUENCES[name]
    taken = [seconds + cold * (i < processes) for i, seconds in enumerate(taken)]
    assert broken(finished(taken, processes=processes), costs, monkeypatch) == []


def test_a_first_part_that_loads_would_be_taken_for_the_pace_of_all(monkeypatch):
    monkeypatch.setattr(TimeLeft, "seconds", property(naive))
    cold, taken, costs = SEQUENCES["cold first parts"]
    taken = [taken[0] + cold, *taken[1:]]
    assert broken(finished(taken, processes=1), costs, monkeypatch)


def naive(left):
    """The time so far, extrapolated."""
    then, cost = left._last
    return then / cost * (left.cost - cost) if cost >= KNOWN_FROM * left.cost else None


def test_rows_are_counted_and_the_time_left_is_of_their_cost(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "A_LINE_EVERY", 0.0)
    clock = Clock(monkeypatch)
    costs = (1.0, 1.0, 1.0, 1.0, 6.0, 10.0)
    work = [process_pool.Piece(list, (), rows=2, cost=cost) for cost in costs]

    def run(work, processes):
        for piece in work:
            clock.now += 6 * piece.cost
            yield piece, ["row", "row"]

    monkeypatch.setattr(process_pool, "run", run)
    assert [*worked_off(work)] == 12 * ["row"]
    told = capsys.readouterr()
    assert (told.out, told.err.splitlines()) == (
        "",
        [
            "verifying: 2 of 12 after 6 s",
            "verifying: 4 of 12 after 12 s",
            "verifying: 6 of 12 after 18 s",
            "verifying: 8 of 12 after 24 s",
            "verifying: 10 of 12 after 60 s, about 1:00 left",
            "verifying: 12 of 12 after 120 s, less than 30 s left",
        ],
    )


@pytest.mark.parametrize(("every", "said"), [(0.0, ["2 of 5", "5 of 5"]), (30.0, [])])
def test_a_log_is_told_how_far_a_long_run_is(monkeypatch, capsys, every, said):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(progress, "A_LINE_EVERY", every)
    assert [*tracked([[2, 3], [5, 7, 11]], total=5)] == [2, 3, 5, 7, 11]
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [f"verifying: {count} after 0 s" for count in said]


def test_a_bar_says_the_same(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    clock = Clock(monkeypatch)
    with counting("verifying", 100) as show:
        for done in (1, 5):
            clock.now += 3.0
            show(done)
    assert "left" not in capsys.readouterr().err
    with counting("verifying", 100) as show:
        for done in (2, 4, 6, 8, 12):
            clock.now += 10.0
            show(done)
    assert "about 5:52 left" in capsys.readouterr().err
