"""Vision-language models of random weights, end to end: one artifact of three graphs, run, optimized, verified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import graphopt
from graphopt.artifact.manifest import read_manifest
from graphopt.compile.replay import verify
from graphopt.errors import InputError
from graphopt.inference.decoding.continuation import Settings
from graphopt.inference.images import (
    ImageDecoder,
    complete,
    load_vision_language,
    steps,
)
from tests.cached_folders import cached_folder
from tests.checkpoints import EXPORTS
from tests.cli.test_embeddings import call
from tests.signals import write_image
from tests.vision_language import (
    COUNT,
    IMAGE,
    IMAGE_ID,
    greedy,
    open_images,
    placeholder,
    prompts_of,
    transformers_text,
    write_vision_language_checkpoint,
)

GREEDY = Settings(COUNT)
# Float32, run in another order of sums: seen 3e-6 on logits of up to 4.
FLOAT32 = 1e-4


def folder_of(family: str) -> Path:
    return cached_folder(
        f"{family}-images-folder",
        ("tests/vision_language.py",),
        lambda folder: write_vision_language_checkpoint(family, folder),
    )


def artifact_of(family: str) -> Path:
    """Export a family once for all tests."""

    def write(folder: Path) -> None:
        graphopt.export(folder_of(family), folder)

    sources = ("tests/vision_language.py", "graphopt/tasks/vision_language/*.py", *EXPORTS)
    return cached_folder(f"{family}-images-artifact", sources, write)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    return [write_image(folder / f"{n}.png", n, size) for n, size in enumerate([(60, 40), (33, 52)])]


@pytest.mark.parametrize("family", ["llava", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3"])
def test_texts_and_logits_are_those_of_transformers(family: str, pictures: list[Path]) -> None:
    import transformers

    folder = artifact_of(family)
    manifest = read_manifest(folder)
    assert (manifest.task, [*manifest.parts]) == ("vision_language", ["vision", "embedding"])
    assert [read_manifest(folder / part).task for part in manifest.parts] == ["vision_tower", "token_embedding"]
    (check,) = manifest.checks
    assert (check.status, check.figures["largest_change"] <= FLOAT32) == ("measured", True)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder_of(family)).eval()
    session = load_vision_language(folder)
    prompts = prompts_of(family, session, pictures)
    for prompt, numbers in prompts:
        assert prompt.tokens.count(IMAGE_ID) == len(prompt.features) > 0
        tokens, logits = greedy(session, prompt)
        expected_tokens, expected = transformers_text(model, numbers)
        assert tokens == expected_tokens
        np.testing.assert_allclose(logits, expected, rtol=0, atol=FLOAT32)
        assert len(set(tokens)) > 1
    # A row of a batch, with padding in front, is what it is alone.
    batch = complete(session, [prompt for prompt, _ in prompts], GREEDY)
    assert [row.tokens for row in batch] == [complete(session, [prompt], GREEDY)[0].tokens for prompt, _ in prompts]
    text = "".join(step.texts[0] for step in steps(session, [prompts[0][0]], GREEDY))
    assert text == batch[0].text


def test_images_whose_tokens_see_one_another_are_fed_whole(
    pictures: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = load_vision_language(artifact_of("gemma3"))
    _, (prompt, _) = prompts_of("gemma3", session, pictures)
    tokens, logits = greedy(session, prompt)
    monkeypatch.setattr("graphopt.inference.decoding.decoder._PIECE", 6)
    decoder = ImageDecoder(session.decoder, [prompt], session.image_token)
    begins = [begin for begin, _ in decoder.feed(np.array([prompt.tokens], np.int64))]
    assert len(begins) > 2
    assert all(prompt.tokens[begin - 1 : begin + 1] != [IMAGE_ID] * 2 for begin in begins[1:])
    in_pieces, logits_in_pieces = greedy(session, prompt)
    assert in_pieces == tokens
    np.testing.assert_allclose(logits_in_pieces, logits, rtol=0, atol=FLOAT32)


def test_a_text_without_images_is_a_text(pictures: list[Path]) -> None:
    import torch
    import transformers

    session = graphopt.load(artifact_of("llava"))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder_of("llava")).eval()
    ids = session.encode("import os")
    expected = model.generate(torch.tensor([ids]), max_new_tokens=COUNT, min_new_tokens=COUNT, do_sample=False)
    (completion,) = graphopt.generate(session, [ids], max_new_tokens=COUNT)
    assert completion.tokens == expected[0, len(ids) :].tolist()
    # The token of an image is a token like others where there is no image.
    rows = session.logits(np.array([[5, IMAGE_ID, 7]]))
    with torch.no_grad():
        reference = model(torch.tensor([[5, IMAGE_ID, 7]])).logits.numpy()
    np.testing.assert_allclose(rows, reference, rtol=0, atol=FLOAT32)
    assert len(pictures) == 2


def test_the_decoder_is_rotated_behind_its_input_and_proved(pictures: list[Path], tmp_path: Path) -> None:
    folder = artifact_of("llava")
    result = graphopt.optimize(folder, "rotate", tmp_path / "out")
    for part in (result, *result.parts.values()):
        assert part.manifest.check("certificate", after="rotate").status == "proved"
    # One Hadamard at run time, behind the embeddings: all else of the residual is in the weights.
    (hadamard,) = [node for node in result.model.graph if node.op_type == "Hadamard"]
    assert hadamard.inputs[0] is not None
    assert hadamard.inputs[0].name == "inputs_embeds"
    (report,) = [report for report in result.manifest.passes if report.name == "rotate"]
    assert any("down_proj" in change.where for change in report.changes)
    before, after = load_vision_language(folder), load_vision_language(tmp_path / "out")
    for prompt, _ in prompts_of("llava", before, pictures):
        tokens, logits = greedy(before, prompt)
        rotated_tokens, rotated_logits = greedy(after, prompt)
        assert tokens == rotated_tokens
        np.testing.assert_allclose(logits, rotated_logits, rtol=0, atol=FLOAT32)
    statuses = {(check.name, check.after): check.status for check in verify(folder, tmp_path / "out").checks}
    assert {statuses["replay", f"{part}the recipe"] for part in ("", "vision: ", "embedding: ")} == {"proved"}
    assert statuses["image features", "vision: the recipe"] == "measured"


@pytest.mark.parametrize("recipe", ["int4", "small", "rotate-kv4-rtn"])
def test_all_graphs_are_quantized_and_judged(recipe: str, pictures: list[Path], tmp_path: Path) -> None:
    folder = artifact_of("llava")
    result = graphopt.optimize(folder, recipe, tmp_path / "out")
    # Random weights of 64 columns in 4 bits; caches of 4 bits lose less.
    assert 0 <= result.manifest.check("quality").figures["kl_mean"] < 0.1
    session = load_vision_language(tmp_path / "out")
    assert session.decoder.interface.has_pages == (recipe == "rotate-kv4-rtn")
    prompts = [prompt for prompt, _ in prompts_of("llava", session, pictures)]
    batch = complete(session, prompts, GREEDY)
    assert [row.tokens for row in batch] == [complete(session, [prompt], GREEDY)[0].tokens for prompt in prompts]
    if recipe != "rotate-kv4-rtn":
        for part in ("", "vision", "embedding"):
            size, before = ((root / part / "model.onnx.data").stat().st_size for root in (tmp_path / "out", folder))
            assert size < 0.5 * before
    assert {check.status for check in verify(folder, tmp_path / "out").checks} <= {"measured", "proved"}


def test_a_graph_takes_a_recipe_of_its_own(tmp_path: Path) -> None:
    folder, int4 = artifact_of("llava"), graphopt.load_recipe("int4-rtn")
    file = tmp_path / "recipe.yaml"
    file.write_text(int4.to_yaml().replace("graphs: {}", "graphs: {vision: int8}"))
    result = graphopt.optimize(folder, file, tmp_path / "out", quality_tokens=0)
    recipes = {name: part.manifest.recipe for name, part in result.parts.items()}
    assert {name: recipe and recipe["name"] for name, recipe in recipes.items()} == {
        "vision": "int8",
        "embedding": "int4-rtn",
    }
    kinds = {node.op_type for node in result.parts["vision"].model.graph}
    assert "RoundActivations" in kinds or "MatMulDynamic" in kinds
    statuses = {(check.name, check.after): check.status for check in verify(folder, tmp_path / "out").checks}
    assert statuses["replay", "vision: the recipe"] == "proved"
    with pytest.raises(InputError, match="has a recipe for a graph tower, which this model has not"):
        graphopt.optimize(folder, int4.model_copy(update={"graphs": {"tower": int4}}), tmp_path / "other")


def test_run_writes_texts_about_images(
    pictures: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = artifact_of("llava")
    images = [option for file in pictures for option in ("--image", file)]
    options = ("run", folder, *images, "--max-new-tokens", COUNT)
    code, out, _ = call(monkeypatch, capsys, *options, "--prompt", "import os", "--prompt", "def", "--json")
    assert code == 0
    rows = json.loads(out)
    session = load_vision_language(folder)
    prompts = [session.prompt(text, open_images(pictures)) for text in ("import os", "def")]
    assert prompts[0].tokens[: 2 * 16] == [IMAGE_ID] * 32
    assert [row["tokens"] for row in rows] == [row.tokens for row in complete(session, prompts, GREEDY)]
    code, out, _ = call(monkeypatch, capsys, *options, "--prompt", "import os")
    assert (code, out) == (0, rows[0]["text"] + "\n")
    for wrong, complaint in (
        (("--chat", "--prompt", "a"), "a prompt with images is answered once"),
        (("--audio", "a.wav", "--prompt", "a"), "a vision-language model reads texts or images, and no recordings"),
        (("--prompt", f"{IMAGE} one"), "the processor refuses the prompt and its images"),
    ):
        code, _, complaints = call(monkeypatch, capsys, *options, *wrong)
        assert code != 0
        assert complaint in " ".join(complaints.split())


def test_a_prompt_is_put_into_the_chat_template(pictures: list[Path], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "chat"
    shutil.copytree(artifact_of("llava"), folder)
    template = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.content %}"
        "{{ c.text if c.type == 'text' else '" + IMAGE + "' }}{% endfor %}{% endfor %} reply:"
    )
    (folder / "chat_template.jinja").write_text(template)
    session = load_vision_language(folder)
    assert session.with_placeholders("what is it?", 2) == f"user:{IMAGE}{IMAGE}what is it? reply:"
    assert session.with_placeholders(f"{IMAGE} here", 1) == f"{IMAGE} here"


def test_what_does_not_fit_is_refused(pictures: list[Path]) -> None:
    session = load_vision_language(artifact_of("llava"))
    with pytest.raises(InputError, match="there is no image"):
        session.prompt("a", [])
    numbers = session.processor(text=[f"a {IMAGE}"], images=open_images(pictures[:1]), return_tensors="np")
    with pytest.raises(InputError, match="the prompt has 0 image tokens, and the images have 16 features"):
        session.prompt_of_numbers(np.array([5, 6]), numbers)
    with pytest.raises(InputError, match=r"an image comes as \[3, 8, 8\] numbers, and the vision tower takes"):
        session.prompt_of_numbers(np.array([5]), {"pixel_values": np.zeros((1, 3, 8, 8), np.float32)})
    with pytest.raises(InputError, match="the processor hides a part of an image"):
        session.features_of({**numbers, "pixel_attention_mask": np.zeros((1, 1, 32, 32))})
    with pytest.raises(InputError, match="of the kind vision_tower"):
        graphopt.load(artifact_of("llava") / "vision")


@pytest.mark.parametrize("family", ["llava"])
def test_genai_writes_the_same_text(family: str, pictures: list[Path]) -> None:
    import onnxruntime_genai as og

    folder = artifact_of(family)
    session = load_vision_language(folder)
    marker = placeholder(family)
    numbers = session.processor(text=[f"import {marker} os"], images=open_images(pictures[:1]), return_tensors="np")
    prompt = session.prompt_of_numbers(numbers["input_ids"][0], numbers)
    tensors = og.NamedTensors()
    tensors["input_ids"] = np.array([prompt.tokens], np.int32)
    tensors["num_image_tokens"] = np.array([len(prompt.features)], np.int64)
    for name in ("pixel_values", "image_grid_thw"):
        if name in numbers:
            tensors[name] = np.ascontiguousarray(numbers[name])
    model = og.Model(str(folder))
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt.tokens) + COUNT, do_sample=False)
    generator = og.Generator(model, parameters)
    generator.set_inputs(tensors)
    tokens: list[int] = []
    while len(tokens) < COUNT:
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
    assert tokens == greedy(session, prompt)[0]
