"""The layer that predicts one more token as a proposer: its export, right and wrong guesses, what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from graphopt.artifact.artifact import MTP
from graphopt.compile.pipeline import optimize
from graphopt.errors import InputError
from graphopt.inference.decoding.proposers.mtp import Mtp
from graphopt.inference.decoding.proposers.registry import open_speculation
from graphopt.inference.decoding.sampling import GREEDY, Sampling
from graphopt.inference.decoding.speculation import Speculation
from graphopt.inference.generation import generate
from graphopt.inference.prefix_cache import PrefixCache
from graphopt.inference.session import Session, load
from graphopt.models.export import export
from graphopt.models.loading import load as load_checkpoint
from graphopt.models.mtp_head import load_head
from graphopt.passes.recipe import load_recipe
from tests.mtp import write_mtp_checkpoint
from tests.native import needs_library

pytestmark = [needs_library, pytest.mark.usefixtures("costs_are_measured_briefly")]

PROMPTS = [[*range(60, 100), 5, 6, 7], [41], [3, 200, 17, 3, 200]]
SAMPLING = Sampling(0.8, top_p=0.9, seed=7)
# Of a layer that looks at one token alone, where all else is a tenth of what it is in a random model.
SHARE = 0.1


@pytest.fixture(scope="module")
def mtp_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in DeepSeek-V3's layout whose layer often guesses right."""
    folder = tmp_path_factory.mktemp("mtp")
    write_mtp_checkpoint(folder / "checkpoint", "deepseek_v3", SHARE)
    export(folder / "checkpoint", folder / "float32", mtp=True)
    return folder / "float32"


@pytest.fixture(scope="module")
def session(mtp_artifact: Path) -> Session:
    """The model and its head, rotated, in codes of 8 bits, with caches in pages."""
    recipe = load_recipe("rotate-int4-rtn").with_lower("ort-cpu:avx2")
    recipe = recipe.setting("quantize_weights", linear={"format": "int8", "group": 64})
    optimize(mtp_artifact, recipe, mtp_artifact.parent / "made", quality_tokens=0)
    return load(mtp_artifact.parent / "made", threads=1)


@pytest.mark.parametrize(
    ("sampling", "smallest_share"), [(GREEDY, 0.3), (SAMPLING, 0.05)]
)  # half and a sixth when it was written
def test_right_guesses_save_steps_and_wrong_ones_change_no_text(
    session: Session, sampling: Sampling, smallest_share: float
) -> None:
    prompt = PROMPTS[:1]
    expected = generate(session, prompt, max_new_tokens=40, sampling=sampling)
    speculation = Speculation(Mtp(session, min_chance=0), 3)
    assert generate(session, prompt, max_new_tokens=40, sampling=sampling, proposer=speculation) == expected
    right, checks = (sum(counts.values()) for counts in (speculation.stats.right, speculation.stats.checks))
    assert smallest_share * checks < right < checks  # both kinds are there
    assert sum(speculation.stats.widths.values()) == 39 - right  # without drafts there are 39 steps behind the prompt


def test_a_batch_of_prompts_of_other_lengths_keeps_its_texts(session: Session) -> None:
    expected = generate(session, PROMPTS, max_new_tokens=12)
    speculation = Speculation(Mtp(session), 3)
    assert generate(session, PROMPTS, max_new_tokens=12, proposer=speculation) == expected
    assert sum(speculation.stats.right.values()) > 0


def test_a_head_begins_behind_a_prompt_whose_states_are_gone(session: Session) -> None:
    cache, prompt = PrefixCache(session), PROMPTS[0]
    generate(session, [prompt], max_new_tokens=1, cache=cache)
    longer = [*prompt, 8, 9]
    expected = generate(session, [longer], max_new_tokens=16)
    speculation = Speculation(Mtp(session), 3)
    assert generate(session, [longer], max_new_tokens=16, cache=cache, proposer=speculation) == expected
    assert sum(speculation.stats.right.values()) > 0


def test_one_head_serves_texts_one_after_the_other_and_goes_on_with_the_last(session: Session) -> None:
    speculation = Speculation(Mtp(session), 2)
    text = PROMPTS[2]
    for _ in range(2):
        expected = generate(session, [text], max_new_tokens=8)
        assert generate(session, [text], max_new_tokens=8, proposer=speculation) == expected
        text = [*text, *expected[0].tokens, 11]
    expected_last = generate(session, PROMPTS[:1], max_new_tokens=8)
    assert generate(session, PROMPTS[:1], max_new_tokens=8, proposer=speculation) == expected_last


def test_another_proposer_may_guess_before_it(session: Session) -> None:
    speculation = open_speculation(session, "mtp", "3")  # behind what a grammar forces
    expected = generate(session, PROMPTS[:1], max_new_tokens=8)
    assert generate(session, PROMPTS[:1], max_new_tokens=8, proposer=speculation) == expected
    proposer = Mtp(session)
    drafts = Speculation(_After([expected[0].tokens[1:2]], proposer), 3)
    assert generate(session, PROMPTS[:1], max_new_tokens=8, proposer=drafts) == expected


class _After(Mtp):
    """Proposes behind prefixes."""

    def __init__(self, prefixes: list[list[int]], inner: Mtp) -> None:
        self.__dict__.update(inner.__dict__)
        self._prefixes = prefixes

    def propose(self, prefixes: object, limits: object) -> list:  # type: ignore[type-arg, override]
        del prefixes
        return super().propose(self._prefixes, limits)  # type: ignore[arg-type]


def test_a_head_in_the_layout_of_qwen3_next_has_the_weights_of_its_checkpoint(tmp_path: Path) -> None:
    head = write_mtp_checkpoint(tmp_path, "qwen3_next")
    loaded_head = load_head(load_checkpoint(str(tmp_path)), "here")
    expected = {f"mtp.{name}": tensor for name, tensor in head.named_parameters() if name.startswith("layers.")}
    assert len(expected) > 10
    for name, tensor in expected.items():
        assert np.array_equal(loaded_head.weights[name].numpy(), tensor.detach().numpy()), name
    assert not loaded_head.notes


def test_what_has_no_head_is_refused_with_what_to_do(
    session: Session, mtp_artifact: Path, llama_artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="without a layer that predicts") as error:
        Mtp(load(llama_artifact, threads=1))
    assert "--mtp" in str(error.value)
    checkpoint = mtp_artifact.parent / "checkpoint"
    from safetensors.numpy import load_file, save_file

    shutil.copytree(checkpoint, tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(file)
    of_head = {name for name in tensors if name.startswith("model.layers.1.")}
    save_file({name: tensor for name, tensor in tensors.items() if name not in of_head}, file, {"format": "pt"})
    with pytest.raises(InputError, match="no layer that predicts one more token"):
        export(tmp_path / "plain", tmp_path / "out", mtp=True)
    weight_name = "model.layers.1.eh_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != weight_name}, file, {"format": "pt"})
    with pytest.raises(InputError, match="lacks 1 weight") as error:
        export(tmp_path / "plain", tmp_path / "out", mtp=True)
    assert "eh_proj" in str(error.value)
    with pytest.raises(InputError, match="Hugging Face model only"):
        export(mtp_artifact, tmp_path / "out", mtp=True)
    assert (mtp_artifact / MTP / "model.onnx").is_file()
