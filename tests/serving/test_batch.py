"""The Engine on its thread: a pool that is too small, streams that go on, streams that are taken back."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphopt.inference.session import load
from graphopt.serving.batch import Batch
from graphopt.serving.stream import Event, Turn
from tests.serving.conftest import with_blocks

TEXTS = ("def read_lines(path):\n", "class Stack:\n", "import ", "for line in stream:\n", "x = [")


BLOCKS = 12
"""Blocks of a pool that is soon full: 192 tokens."""


class CountingBatch(Batch):
    """A batch that counts how often a request had to leave."""

    room_calls = 0

    def _make_room(self) -> None:
        self.room_calls += 1
        super()._make_room()


@pytest.fixture(scope="module")
def prompts(shipped_artifact: Path) -> list[tuple[int, ...]]:
    session = load(shipped_artifact, threads=1)
    return [tuple(session.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def wide(served_folder: Path) -> Iterator[CountingBatch]:
    batch = CountingBatch(served_folder, threads=1, on_failure=print)
    yield batch
    batch.close()


@pytest.fixture(scope="module")
def tight(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingBatch]:
    folder = with_blocks(served_folder, tmp_path_factory.mktemp("tight") / "python", BLOCKS)
    batch = CountingBatch(folder, threads=1, on_failure=print)
    yield batch
    batch.close()


def run(batch: Batch, turns: list[Turn]) -> list[tuple[list[int], Event]]:
    """Run turns together, and return the tokens and the last event of each."""
    events: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in turns]
    for turn, events_of_turn in zip(turns, events, strict=True):
        batch.begin(turn, events_of_turn.put)
    results = []
    for events_of_turn in events:
        tokens = []
        while (event := events_of_turn.get(timeout=60)).finish is None:
            tokens.append(event.token)
        results.append((tokens, event))
    return results


def test_a_pool_that_is_full_changes_no_token(
    wide: CountingBatch, tight: CountingBatch, prompts: list[tuple[int, ...]]
) -> None:
    ways = ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 7}, {"guidance": ("regex", "[a-z ]{300}")}, {})
    turns = [Turn(prompts[i % len(prompts)], 30 + i, **ways[i % len(ways)]) for i in range(20)]  # type: ignore[arg-type]
    # 20 requests of 3 blocks or more each
    assert BLOCKS < 20 * 3
    expected = run(wide, turns)
    assert wide.room_calls == 0
    assert [len(tokens) for tokens, _ in expected] == [30 + i for i in range(20)]
    assert [tokens for tokens, _ in run(tight, turns)] == [tokens for tokens, _ in expected]
    assert tight.room_calls > 0


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}, {"guidance": ("regex", "[a-z]{5}[0-9]{20}")}],
    ids=["greedy", "drawn", "guided"],
)
def test_a_stream_goes_on_where_another_worker_left_it(
    sampling: dict[str, object], wide: CountingBatch, prompts: list[tuple[int, ...]]
) -> None:
    (whole, _), *_ = run(wide, [Turn(prompts[0], 24, **sampling)])  # type: ignore[arg-type]
    (continuation, last), *_ = run(wide, [Turn(prompts[0], 24, prior_tokens=tuple(whole[:9]), **sampling)])  # type: ignore[arg-type]
    assert continuation == whole[9:]
    assert last.finish == ("length" if len(whole) == 24 else "stop")


def test_a_stream_that_is_cancelled_gives_its_blocks_back(tight: CountingBatch, prompts: list[tuple[int, ...]]) -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    room_calls = tight.room_calls
    long = tight.begin(Turn(prompts[0], 170, min_tokens=170), events.put)
    for _ in range(80):  # about half of the pool
        assert events.get(timeout=60).finish is None
    tight.cancel(long)
    while (event := events.get(timeout=60)).finish is None:
        pass
    assert event.finish == "cancelled"
    (tokens, last), *_ = run(tight, [Turn(prompts[1], 170, min_tokens=170)])
    assert (len(tokens), last.finish) == (170, "length")
    assert tight.room_calls == room_calls
    tight.cancel(long)  # nothing happens


def test_what_the_engine_refuses_harms_no_other(wide: CountingBatch, prompts: list[tuple[int, ...]]) -> None:
    good, wrong = Turn(prompts[1], 12), Turn(prompts[1], 12, guidance=("json_schema", "{"))
    (tokens, _), (no_tokens, refusal), (other_tokens, _) = run(wide, [good, wrong, good])
    assert (no_tokens, refusal.finish) == ([], "error")
    assert refusal.message
    assert tokens == other_tokens


def test_an_engine_that_cannot_go_on_says_so(served_folder: Path, prompts: list[tuple[int, ...]]) -> None:
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()
    batch = Batch(served_folder, threads=1, on_failure=failures.put)
    # A worker refuses such a token before: one request would take all others with it.
    last = run(batch, [Turn(prompts[0], 40), Turn((1 << 20,), 4)])
    assert "no longer healthy" in str(failures.get(timeout=60))
    assert {event.finish for _, event in last} == {"cancelled"}
    batch.close()


def test_a_folder_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="genai_config"):
        Batch(tmp_path, on_failure=print)
