from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from graphopt.errors import InputError
from graphopt.inference.decoding.logprobs import token_logprob
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.generation import generate, stream
from graphopt.inference.session import Session, load


@pytest.fixture(scope="module")
def session(llama_artifact: Path) -> Session:
    return load(llama_artifact, threads=1)


def test_they_are_the_log_softmax_of_the_model_s_logits(session: Session) -> None:
    prompt = [5, 6, 7]
    completion = generate(session, [prompt], max_new_tokens=6, sampling=Sampling(2.0, top_k=5, seed=1), logprobs=3)[0]
    assert completion.logprobs is not None
    logits = session.logits(np.array([prompt + completion.tokens]))[0]
    for position, (token, chosen_logprob) in enumerate(
        zip(completion.tokens, completion.logprobs, strict=True), start=len(prompt) - 1
    ):
        expected = torch.log_softmax(torch.from_numpy(logits[position]).double(), -1).numpy()
        best_tokens = np.argsort(-expected)[:3]
        # steps and one run differ by the rounding of float32 in a model of two layers
        assert chosen_logprob.logprob == pytest.approx(expected[token], abs=1e-4)
        assert (chosen_logprob.token, [top.token for top in chosen_logprob.top]) == (token, best_tokens.tolist())
        assert [top.logprob for top in chosen_logprob.top] == pytest.approx(expected[best_tokens].tolist(), abs=1e-4)
        assert chosen_logprob.text is not None
    assert (
        completion.model_copy(update={"logprobs": None})
        == generate(session, [prompt], max_new_tokens=6, sampling=Sampling(2.0, top_k=5, seed=1))[0]
    )


def test_none_of_the_others_when_none_is_asked_for(session: Session) -> None:
    steps = list(stream(session, [[5], [6]], max_new_tokens=2, logprobs=0))
    assert all(logprob is not None and logprob.top == [] for step in steps for logprob in step.logprobs)
    logprob = token_logprob(session, np.array([0.0, 1.0, -np.inf], np.float32), 1, 9)
    assert [top.token for top in logprob.top] == [1, 0, 2]
    with pytest.raises(InputError, match="logprobs cannot be -1"):
        generate(session, [[5]], logprobs=-1)
