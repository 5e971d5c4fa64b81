"""Drafts never change a text: every proposer, storage, policy and product against plain decoding, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.errors import InputError
from graphopt.inference.decoding.continuation import Continuation, Settings, start
from graphopt.inference.decoding.decoder import Decoder
from graphopt.inference.decoding.draft_lengths import Lengths
from graphopt.inference.decoding.draft_verification import Verdict
from graphopt.inference.decoding.proposers import Guess, Lookup, ModelProposer, Proposer
from graphopt.inference.decoding.proposers.model import FollowedTexts
from graphopt.inference.decoding.proposers.registry import open_speculation
from graphopt.inference.decoding.proposers.self_model import SelfProposer
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.decoding.step_costs import costs_of
from graphopt.inference.generation import complete, generate, run
from graphopt.inference.session import Session, load
from graphopt.passes.cache.sparse_kv import SparseKV
from graphopt.runtime_ops.kv_attention.spec.storages import STORAGE_OF
from tests.families import VOCABULARY
from tests.native import needs_library
from tests.paged_artifacts import paged_artifact, with_caches
from tests.pairwise import pairwise
from tests.small_models import byte_tokenizer, counting_model

pytestmark = [needs_library, pytest.mark.usefixtures("costs_are_measured_briefly")]

# A page is 16 tokens: rings go round, pages are rounded and means follow within 60 tokens.
POLICIES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "streaming": {"policy": "streaming", "sinks": 5, "recent": 20},
    "means": {"policy": "streaming", "sinks": 5, "recent": 20, "compensate": True},
    "retrieval": {"policy": "retrieval", "sinks": 3, "recent": 16, "budget": 1},
    "mean-pages": {"policy": "retrieval", "sinks": 3, "recent": 18, "budget": 2, "summary": "mean"},
}
# int3 packs 32 numbers at a time: neither these pages nor heads of 16 hold it.
STORAGES = [name for name, storage in STORAGE_OF.items() if storage.levels is None or storage.unit <= 16]
PRODUCTS = ("int4-rtn", "fp6-rtn", "w4a8-rtn")
BEGINNING = [*range(60, 100)]  # so that rings go round while there are drafts
PROMPTS = [
    [*BEGINNING, 5, 6, 7, 8, 9, 5, 6, 7],
    [41],
    [*BEGINNING[:20], 3, 200, 17, 3, 200],
    [*BEGINNING[:31], 250, 4, 9, 33, 8, 9, 33, 8, 9],
    *([number] for number in range(4)),
]
SAMPLING = Sampling(0.8, top_p=0.9, seed=7)


class Nonsense(Proposer):
    """Guesses anything; sometimes what really comes, sometimes nothing.

    Args:
        texts: the tokens that plain decoding makes, by row.
        honest: how often a guess is what comes.
        seed: of lengths and guesses.
        long: whether drafts are as long as they may be.
    """

    def __init__(self, texts: Sequence[Sequence[int]], honest: float, seed: int = 0, *, long: bool = False) -> None:
        self.texts, self.honest, self.long, self.random = texts, honest, long, np.random.default_rng(seed)

    def begin(self, rows: Sequence[Continuation]) -> None:
        self.rows = rows

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        drafts = []
        for row, text, first, limit in zip(self.rows, self.texts, prefixes, limits, strict=True):
            length = limit if self.long else int(self.random.integers(0, limit + 1))
            position = len(row.tokens) + len(first)
            coming = text[position : position + length]
            coming = [*coming, *[0] * (length - len(coming))]
            wrong = self.random.random(length) >= self.honest
            tokens = np.where(wrong, self.random.integers(0, VOCABULARY, length), np.array(coming, int))
            drafts.append([Guess(int(token), 0.5, "nonsense") for token in tokens])
        return drafts

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        pass


@pytest.fixture(scope="module")
def make_paged(llama_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the small Llama with caches in pages and products of ours; each is made once."""
    return partial(paged_artifact, llama_artifact, tmp_path_factory.mktemp("paged"))


@pytest.fixture(scope="module")
def make_session(make_paged: Callable[[str], Path]) -> Callable[[str, str, str], Session]:
    """Return a function that opens a model with a storage and a policy, each once."""

    @cache
    def make(products: str, storage: str, policy: str) -> Session:
        return with_caches(make_paged(products), storage, POLICIES[policy])

    return make


CASES = pairwise(STORAGES, list(POLICIES), PRODUCTS, (1, 8), (Sampling(), SAMPLING), ("lookup", "right", "wrong"))


@pytest.mark.parametrize(("storage", "policy", "products", "batch", "sampling", "proposer"), CASES)
def test_drafts_change_nothing(
    make_session: Any, storage: str, policy: str, products: str, batch: int, sampling: Sampling, proposer: str
) -> None:
    session = make_session(products, storage, policy)
    assert costs_of(session, batch).different == ()
    settings = Settings(40, sampling, logprobs=0)
    plain = complete(session, PROMPTS[:batch], settings)
    honest = {"right": 0.9, "wrong": 0.1}
    drafter = (
        Lookup() if proposer == "lookup" else Nonsense([completion.tokens for completion in plain], honest[proposer])
    )
    speculation = Speculation(drafter, 7)
    # Log probabilities too: their bits are those of the logits.
    assert complete(session, PROMPTS[:batch], settings, speculation) == plain
    stats = speculation.stats
    assert stats.tokens == sum(
        len(completion.tokens) - 1 + (completion.stopped == "end of text") for completion in plain
    )
    assert sum(stats.checks.values()) > (0 if proposer == "lookup" else 5)
    if proposer == "right":
        assert stats.passes < 30  # plain decoding takes 39


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99), honest=st.sampled_from([0.3, 0.8, 1.0]), steps_to_run=st.integers(1, 45), data=st.data()
)
def test_a_cache_holds_what_it_would_without_drafts(
    make_session: Any, seed: int, honest: float, steps_to_run: int, data: st.DataObject
) -> None:
    storage, policy = data.draw(st.sampled_from(STORAGES)), data.draw(st.sampled_from(list(POLICIES)))
    session, prompts = make_session("fp6-rtn", storage, policy), PROMPTS[:1]
    texts = [completion.tokens for completion in generate(session, prompts, max_new_tokens=60)]

    def run_steps(speculation: Speculation | None) -> tuple[Decoder, list[int]]:
        rows = [start(session, prompt, Settings(60), name="it") for prompt in prompts]
        decoder = Decoder(session, 1)
        drafts = None if speculation is None else speculation.start(session, rows)
        with closing(run(decoder, rows, np.array(prompts), drafts=drafts)) as steps:
            for _, _ in zip(range(steps_to_run), steps, strict=False):
                pass
        return decoder, rows[0].tokens

    (plain, tokens), (draft_decoder, draft_tokens) = (
        run_steps(None),
        run_steps(Speculation(Nonsense(texts, honest, seed), 11)),
    )
    assert tokens == draft_tokens
    # Where a summary cannot be computed again the cache may lag behind: what it lacks is fed again.
    assert storage in ("float16", "bfloat16", "float8") or draft_decoder.tokens[0] == plain.tokens[0]
    text, logits = [*PROMPTS[0], *tokens, 7], []
    for decoder in (plain, draft_decoder):
        logits.append(decoder.step(np.array([text[int(decoder.tokens[0]) :]]))[:, -1])
    assert np.array_equal(*logits)


def test_a_cache_that_grows_is_rewound(tmp_path: Path) -> None:
    counting_model(tmp_path)
    byte_tokenizer("abcdefg").save(str(tmp_path / "tokenizer.json"))
    session = load(tmp_path, threads=1)
    plain = generate(session, [[1]], max_new_tokens=40)
    speculation = Speculation(Lookup(), 11, strict=True)
    assert generate(session, [[1]], max_new_tokens=40, proposer=speculation) == plain
    assert speculation.stats.passes < 15  # plain decoding takes 39
    assert speculation.stats.acceptance()["lookup"][0] == 1.0
    with pytest.raises(InputError, match="grows by columns.*page_kv"):
        generate(session, [[1], [2]], proposer=Lookup())
    completion = generate(session, ["abcab"], max_new_tokens=40, stop=["f"], proposer=Speculation(Lookup(), 3))
    assert completion == generate(session, ["abcab"], max_new_tokens=40, stop=["f"])


class Wrong(Proposer):
    """Guesses what never comes, and remembers what it was told."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def begin(self, rows: Sequence[Continuation]) -> None:
        self.texts.append([])

    def propose(self, prefixes: Sequence[Sequence[int]], limits: Sequence[int]) -> list[list[Guess]]:
        return [[Guess(self.texts[-1][-1], 0.99, "wrong")] * min(1, limit) for limit in limits]  # the model counts

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        self.texts[-1] += tokens


@pytest.mark.parametrize("honest", [0.3, 0.9])
@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "granitemoehybrid", "gemma3n"])
def test_states_of_recurrences_are_taken_back(family: str, honest: float, make_artifact: Callable[[str], Path]) -> None:
    session = load(make_artifact(family), threads=1)
    plain = generate(session, PROMPTS[:1], max_new_tokens=40)
    speculation = Speculation(Nonsense([plain[0].tokens], honest), 7)
    completions = generate(session, PROMPTS[:1], max_new_tokens=40, proposer=speculation)
    assert completions[0].tokens == plain[0].tokens
    assert sum(speculation.stats.checks.values()) > 3
    assert honest < 0.5 or speculation.stats.passes < 35  # plain decoding takes 39


def test_a_proposer_that_is_not_asked_is_told_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Following a text costs time; but a proposer that shares texts knows all of each when the next one begins."""
    counting_model(tmp_path)
    session, proposer = load(tmp_path, threads=1), Wrong()
    speculation = Speculation(proposer)
    plain = generate(session, [[1]], max_new_tokens=20)
    with monkeypatch.context() as patch:
        patch.setattr(Lengths, "to_ask", lambda *_: 0)
        assert generate(session, [[1]], max_new_tokens=20, proposer=speculation) == plain
        assert proposer.texts == [[]]
    assert generate(session, [[1]], max_new_tokens=20, proposer=speculation) == plain
    assert proposer.texts[0] == [*plain[0].tokens[:-1]]  # nothing comes after the last token
    assert proposer.texts[1] == proposer.texts[0][: len(proposer.texts[1])]


def test_steps_without_drafts_cost_the_proposer_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what the policy takes would overdraw the account of a fast model, and nothing would be drafted again."""
    counting_model(tmp_path)
    session, speculation = load(tmp_path, threads=1), Speculation(Lookup())
    monkeypatch.setattr(Lengths, "to_ask", lambda *_: 0)
    generate(session, [[1]], max_new_tokens=20, proposer=speculation)
    drafting = speculation._newest
    assert drafting is not None
    first_seconds = drafting._drafting  # the beginning is charged with the first step
    assert (first_seconds, speculation.stats.widths) == (0.0, {1: 19})
    loss = speculation.lengths.loss
    for _ in range(5):
        drafting.learn(Verdict([1], [0], [False]), 1, 1.0)
    assert speculation.lengths.loss == loss


def test_a_stalled_step_is_charged_for_twice_its_time_at_most(tmp_path: Path) -> None:
    counting_model(tmp_path)
    session, speculation = load(tmp_path, threads=1), Speculation(Lookup(), 3)
    generate(session, [[1]], max_new_tokens=20, proposer=speculation)
    drafting, loss = speculation._newest, speculation.lengths.loss
    assert drafting is not None
    drafting.learn(Verdict([1], [0], [True]), 2, 1000.0)
    # _STALL times what such a step is now known to take, and not its 1000 s
    assert speculation.lengths.loss - loss <= 2 * costs_of(session, 1).seconds_of(2)


def test_products_that_differ_are_found_and_said(llama_artifact: Path) -> None:
    session = load(llama_artifact, threads=1)
    different = costs_of(session, 1).different
    speculation = Speculation(Lookup(), 3, strict=True)
    plain = generate(session, [PROMPTS[0]], max_new_tokens=30)
    assert generate(session, [PROMPTS[0]], max_new_tokens=30, proposer=speculation) == plain
    assert bool(speculation.stats.notes) == bool(different)
    assert bool(speculation.stats.passes) == (not different)
    batch = Speculation(Lookup(), strict=True)
    assert generate(session, PROMPTS[:2], proposer=batch) == generate(session, PROMPTS[:2])
    assert "grows by columns" in batch.stats.notes[0]


def test_retrieval_that_sees_the_newest_page_is_refused(make_session: Any) -> None:
    session = make_session("fp6-rtn", "float32", "retrieval")
    layer = session.interface.layers[0]
    assert layer.attributes.recent == layer.attributes.page
    model = ir.load(session.file)
    SparseKV(policy="dense")(model)
    for node in model.graph:
        if node.op_type == "KVAttention":
            node.attributes["recent"] = ir.AttrInt64("recent", 15)
    from graphopt.analysis.structure.paged_caches import describe

    describe(model)
    file = session.file.with_name("near.onnx")
    ir.save(model, file)
    with pytest.raises(InputError, match="newest 15: drafts would change the summary.*16 recent tokens or more"):
        generate(load(file, threads=1), [[1]], proposer=Lookup())


# How often such drafts are right at least. A cache that forgets nothing of these texts guesses as the model does, but
# for what is rounded (seen 0.88 to 1.0 by two sets of instructions). Of random weights, one that forgets most is right
# less often (0.38 to 0.41; by retrieval more often), and so is one layer of two (0.08 to 0.16, where chance has 0.004).
@pytest.mark.parametrize(
    ("kind", "smallest_share"),
    [
        ("streaming=128", 0.85),
        ("streaming=16", 0.3),
        ("retrieval=128", 0.85),
        ("retrieval=16", 0.3),
        ("layers=1", 0.05),
    ],
)
def test_a_model_drafts_for_itself(make_session: Any, kind: str, smallest_share: float) -> None:
    session = make_session("int4-rtn", "int8", "dense")
    for sampling in (Sampling(), SAMPLING):
        plain = generate(session, PROMPTS[:3], max_new_tokens=40, sampling=sampling)
        speculation = Speculation(SelfProposer.open(session, kind), 3)
        assert generate(session, PROMPTS[:3], max_new_tokens=40, sampling=sampling, proposer=speculation) == plain
        assert speculation.stats.acceptance()[f"self:{kind}"][0] > smallest_share


def test_the_same_model_is_always_right(make_session: Any) -> None:
    session = make_session("int4-rtn", "float32", "dense")
    # Both draw with the same numbers.
    for sampling in (Sampling(), SAMPLING):
        speculation = Speculation(ModelProposer(session, min_chance=0.0), 7)
        generate(session, PROMPTS[:4], max_new_tokens=30, sampling=sampling, proposer=speculation)
        assert set(speculation.stats.acceptance()["model"]) == {1.0}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLING])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_proposer_of_a_drafting_model_changes_nothing_but_how_often_that_runs(
    make_session: Any, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, batch: int
) -> None:
    """What the model in between guesses is its own: counts of right guesses stay, its steps become fewer."""
    session, smaller = (make_session(products, "float32", "dense") for products in ("fp6-rtn", "int4-rtn"))
    settings = Settings(60, sampling)
    plain = [completion.tokens for completion in complete(session, PROMPTS[:batch], settings)]
    feed, runs = FollowedTexts.feed, []
    monkeypatch.setattr(FollowedTexts, "feed", lambda self, tokens: runs.append(1) or feed(self, tokens))
    runs_and_rates = {}
    for middle in (smaller, session):
        for honest in (None, 0.0, 0.9):
            inner = None if honest is None else Nonsense(plain, honest, long=True)
            runs.clear()
            speculation = Speculation(ModelProposer(middle, min_chance=0.0, proposer=inner), 7)
            completions = complete(session, PROMPTS[:batch], settings, speculation)
            assert [completion.tokens for completion in completions] == plain
            runs_and_rates[honest] = (len(runs), speculation.stats.acceptance())
        assert runs_and_rates[0.0][1] == runs_and_rates[0.9][1] == runs_and_rates[None][1]
    # The last one in the middle says what comes, as nine in ten of three guesses do: 3 steps for 7 guesses, or 4.
    assert runs_and_rates[0.9][0] < 0.7 * runs_and_rates[None][0]
    assert runs_and_rates[0.0][0] > 0.9 * runs_and_rates[None][0]


def test_proposers_of_proposers_have_names(make_session: Any, make_paged: Callable[[str], Path]) -> None:
    session, settings = make_session("fp6-rtn", "float32", "dense"), Settings(40)
    plain = complete(session, PROMPTS[:1], settings)[0].tokens
    for name in ("verified:lookup,self:layers=1", f"verified:self:layers=1,{make_paged('int4-rtn')}"):
        assert complete(session, PROMPTS[:1], settings, open_speculation(session, name, "3"))[0].tokens == plain
    for name in ("verified:lookup", "verified:lookup,lookup", "verified:lookup,verified:lookup,self:layers=1"):
        with pytest.raises(InputError, match="there are no drafts"):
            open_speculation(session, name)


@pytest.mark.parametrize("kind", ["streams", "layers", "layers=9", "layers=0", "streaming=x"])
def test_drafts_of_itself_that_there_are_not(make_session: Any, kind: str) -> None:
    with pytest.raises(InputError, match="self:|layers of a model of 2"):
        SelfProposer.open(make_session("int4-rtn", "float32", "dense"), kind)


def test_another_tokenizer_is_refused(make_session: Any, shipped_artifact: Path, tmp_path: Path) -> None:
    session = make_session("int4-rtn", "float32", "dense")
    with pytest.raises(InputError, match="its tokenizer is not that of .*: its .* differs"):
        open_speculation(session, str(shipped_artifact))
    with pytest.raises(InputError, match="no drafts 'lookups', and no such folder"):
        open_speculation(session, "lookups")
    with pytest.raises(InputError, match="cannot have 'all' tokens"):
        open_speculation(session, "lookup", "all")
    with pytest.raises(InputError, match="cannot have 12 tokens"):
        open_speculation(session, "lookup", "12")
