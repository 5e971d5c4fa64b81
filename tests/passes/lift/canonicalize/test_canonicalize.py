from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from graphopt.artifact import artifact
from graphopt.errors import InputError
from graphopt.verification.equivalence import Verifier
from tests.graphs import logits, relative, residual_model
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize, decompose


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_export_keeps_its_logits_and_says_attention_plainly(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = artifact.read(make_artifact(family)).model
    verifier = Verifier(tmp_path, {})
    verifier.start(model)
    report = canonicalize(model)
    assert verifier.check(model, "canonicalize", "exact").figures["largest_change"] <= FLOAT32
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    assert len(attentions) == 2
    for node in attentions:
        assert node.attributes.get_int("is_causal") == 1
        assert node.inputs[4].name.startswith("past_key_values.")
        assert node.outputs[1].name.startswith("present.")
        assert node.inputs[3].name == "padding_mask"
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["Where"] == kinds["GatherND"] == kinds["Range"] == 0
    assert kinds["Expand"] == 1  # the padding mask
    assert not report.skips


def test_an_opset_that_onnxruntime_cannot_load_is_refused() -> None:
    model = residual_model()
    model.graph.opset_imports[""] = 28
    with pytest.raises(InputError, match="opset 28 is newer than onnxruntime can load.*26"):
        canonicalize(model)


def test_an_older_opset_is_raised(tmp_path: Path) -> None:
    model = residual_model(layers=1)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        decompose(model.graph, norm, "Pow", "Div", gain_first=False)
    model.graph.opset_imports[""] = 18
    report = canonicalize(model)
    assert model.graph.opset_imports[""] == 23
    assert any("opset 18 raised to 23" in str(change.what) for change in report.changes)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
