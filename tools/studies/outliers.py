"""Measure the gain of each rotation where activations have outliers: bits per byte of the shipped model.

Large models have outliers where a small one may not, so they are planted, without changing the model's function, in
places that folding a gain cannot undo (see ``plant``). Activations have a scale per token, as in the presets w4a8-rtn
and w4a4-rtn. The cache of 4 bits is that of the preset kv4: pages of 64 tokens as int4, keys rounded per channel of a
page, values per token, the first page and the newest kept as floats.

python tools/studies/outliers.py --json outliers.json
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import graphopt
from graphopt.analysis.bases.search import find_bases
from graphopt.analysis.structure.products import token_lookups
from graphopt.artifact import artifact as artifacts
from graphopt.artifact.artifact import Artifact
from graphopt.errors import GraphoptError
from graphopt.graph.weights import Inline, Scale, own_input, rewrite
from graphopt.ort.session import session_of
from graphopt.passes.algebra.fold_norms import FoldNorms
from graphopt.passes.algebra.rotate import Rotate
from graphopt.passes.cache.quantize_kv import QuantizeKV
from graphopt.passes.codes.quantize_activations import QuantizeActivations
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.recipe import Recipe, Step
from graphopt.report.demo import MODULES
from graphopt.tasks.causal_lm.interface import Interface
from graphopt.util.stdlib_text import held_out_text, training_texts

Array = npt.NDArray[Any]

FACTOR = 60.0
LOUDNESS = 20.0
"""How many times as large as its neighbours a channel should become: up to 20 in LLM.int8() (Dettmers et al. 2022)."""

LAYERS, GROUP_SIZE, HEAD = range(6), 2, 64  # the shipped model; query heads 0 and 1 read key head 0
VALUE_LAYERS = (1,)
"""Where a value channel is planted. Values have no quiet channel: one that is scaled becomes 45 times as large as its
neighbours. A rotation spreads that over the 64 channels of its head and no further, columns of weights as well: planted
in every head of every layer, 4-bit weights alone cost 0.24 bits per byte with values rotated (0.04 without)."""

ROLES = ("residual", "value", "query_key", "weight_inputs")
ROTATIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{f"{role} alone": (role,) for role in ROLES},
    "all four": ROLES,
    **{f"all but {role}": tuple(kept_role for kept_role in ROLES if kept_role != role) for role in ROLES},
}
BITS: dict[str, tuple[int | None, bool]] = {
    "W4": (None, False),
    "W4A8": (8, False),
    "W4A4": (4, False),
    "W4A4KV4": (4, True),
}
"""Bits of activations, and whether the cache has pages of int4."""


def rotate(roles: Iterable[str], seed: int) -> Recipe:
    """Return a recipe that rotates these places and no others."""
    modes = {role: "hadamard" if role in roles else None for role in ROLES}
    step = Rotate.model_validate({**modes, "seed": seed})
    return Recipe(name="rotate", steps=(step,), activations="float32")


def quantize(bits: int | None, has_int4_cache: bool, group: int, clip: float) -> Recipe:
    """Return a recipe for 4-bit weights and these activations and caches; lm_head and embedding stay as they are."""
    linear = LinearFormat.model_validate({"group": group})
    steps: list[Step] = [QuantizeWeights(linear=linear, lm_head=None, embedding=None)]
    if bits is not None:
        steps.append(QuantizeActivations.model_validate({"bits": bits, "clip": clip}))
    if has_int4_cache:
        steps.append(QuantizeKV(storage="int4"))
    return Recipe(name="quantize", steps=tuple(steps), activations="float32")


def node_of(model: ir.Model, layer: int, name: str) -> ir.Node:
    """Return the node of a layer by the rest of its name."""
    return next(node for node in model.graph if node.name == f"model.layers.{layer}.{name}")


def inputs_of(model: ir.Model, sites: Iterable[tuple[ir.Node, int]], ids: Array) -> list[Array]:
    """Run tokens and return what these nodes read as these inputs, in float64."""
    names = [value.name or "" for node, index in sites if (value := node.inputs[index]) is not None]
    copy = model.clone()
    values_by_name = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.extend(values_by_name[name] for name in dict.fromkeys(names))
    interface = Interface.of_graph(model.graph)
    with session_of(copy) as session:
        feeds = interface.feeds(ids, np.ones_like(ids), interface.empty_past(len(ids)))
        return [array.astype(np.float64) for array in session.run(names, dict(feeds))]


def logits_of(model: ir.Model, ids: Array) -> Array:
    """Run tokens and return their logits."""
    interface = Interface.of_graph(model.graph)
    with session_of(model) as session:
        feeds = interface.feeds(ids, np.ones_like(ids), interface.empty_past(len(ids)))
        return np.asarray(session.run(["logits"], dict(feeds))[0])


def plant(model: ir.Model, ids: Array) -> None:
    """Give a model outliers and leave its function as it is.

    residual: the stream is rotated into its principal components, x -> x Q, so few channels carry most of its energy.
    weight_inputs: per layer one channel times 60 in the columns of up, / 60 in the rows of the down projection.
    value: in one layer, one channel of the first head times 60, / 60 in the rows of the output projection that read it.
    query_key: per layer one rotary pair (channels i and i + 32) of the first key head times 60, of its queries / 60.

    Which channel: the one that becomes nearest to 20 times as large as its neighbours.
    """
    attention = [node_of(model, layer, "self_attn.Attention") for layer in LAYERS]
    down = [node_of(model, layer, "mlp.down_proj.MatMul") for layer in LAYERS]
    keys, values, hidden = (
        inputs_of(model, [(node, index) for node in nodes], ids)
        for nodes, index in ((attention, 1), (attention, 2), (down, 0))
    )
    principal_components(model, ids)
    for layer in LAYERS:
        channel = loudest_to_be(size_of(hidden[layer]))
        scale(node_of(model, layer, "mlp.up_proj.MatMul"), 1, [channel], FACTOR)
        scale(down[layer], 0, [channel], 1 / FACTOR)
        pairs = size_of(keys[layer][:, 0]).reshape(2, -1)
        pair = loudest_to_be(np.sqrt((pairs**2).sum(0)))
        pair_channels = [pair, pair + HEAD // 2]
        scale(node_of(model, layer, "self_attn.k_proj.MatMul"), 1, pair_channels, FACTOR)
        scale(node_of(model, layer, "self_attn.q_proj.MatMul"), 1, in_each_query_head(pair_channels), 1 / FACTOR)
    for layer in VALUE_LAYERS:
        channel = loudest_to_be(size_of(values[layer][:, 0]))
        scale(node_of(model, layer, "self_attn.v_proj.MatMul"), 1, [channel], FACTOR)
        scale(node_of(model, layer, "self_attn.o_proj.MatMul"), 0, in_each_query_head([channel]), 1 / FACTOR)


def principal_components(model: ir.Model, ids: Array) -> None:
    """Rotate the residual stream so that its channels are uncorrelated, in the order of their energy."""
    tokens = token_lookups(model.graph)
    basis = next(basis for basis in find_bases(model.graph) if any(site.node in tokens for site in basis.writers))
    assert not basis.pins
    read_inputs = {site.node.inputs[0]: (site.node, 0) for site in basis.readers}
    moments = sum(np.einsum("bli,blj->ij", x, x) for x in inputs_of(model, list(read_inputs.values()), ids))
    components = np.linalg.eigh(moments)[1][:, ::-1]

    for site in (*basis.writers, *basis.readers):
        weight = own_input(site.node, site.input)
        assert weight.const_value is not None
        old = weight.const_value.numpy()
        new_weight = np.moveaxis(np.moveaxis(old.astype(np.float64), site.axis, -1) @ components, -1, site.axis)
        weight.const_value = ir.tensor(new_weight.astype(old.dtype), name=weight.name)


def scale(node: ir.Node, axis: int, channels: Sequence[int], factor: float) -> None:
    """Scale channels along one axis of the weight that ``node`` multiplies by."""
    weight = own_input(node, 1)
    assert weight.const_value is not None
    factors = np.ones(weight.const_value.shape.numpy()[axis])
    factors[list(channels)] = factor
    rewrite(weight, partial(Scale, factors=Inline.from_array(factors), axis=axis))


def size_of(x: Array) -> Array:
    """Return the root mean square of each channel."""
    return np.asarray(np.sqrt((x**2).mean(axis=tuple(range(x.ndim - 1)))))


def loudest_to_be(sizes: Array) -> int:
    """Return the channel that scaling makes nearest to :data:`LOUDNESS` times as large as the mean square of all."""
    scaled_sizes = FACTOR * sizes / np.sqrt((sizes**2).mean())
    return int(np.abs(np.log(scaled_sizes / LOUDNESS)).argmin())


def in_each_query_head(channels: Sequence[int]) -> list[int]:
    """Return channels of the first key head in the query heads that read it."""
    return [head * HEAD + channel for head in range(GROUP_SIZE) for channel in channels]


def peaks(model: ir.Model, ids: Array) -> dict[str, tuple[float, float]]:
    """Return, by role, how large outliers are in the layers where they are planted.

    First max|x| / rms(x) of a token, the median over tokens; then the same of the sizes of channels, mean of layers.
    """
    names = {
        "residual": ("mlp.up_proj.MatMul", 0),
        "value": ("self_attn.o_proj.MatMul", 0),
        "query_key": ("self_attn.Attention", 1),
        "weight_inputs": ("mlp.down_proj.MatMul", 0),
    }
    peak_by_role = {}
    for role, (name, index) in names.items():
        layers = VALUE_LAYERS if role == "value" else LAYERS
        rows = inputs_of(model, [(node_of(model, layer, name), index) for layer in layers], ids)
        rows = [x[:, 0] if role == "query_key" else x for x in rows]
        tokens = np.concatenate([_peak(x).ravel() for x in rows])
        peak_by_role[role] = float(np.median(tokens)), float(np.mean([_peak(size_of(x)) for x in rows]))
    return peak_by_role


def _peak(x: Array) -> Array:
    return np.asarray(np.abs(x).max(-1) / np.sqrt((x**2).mean(-1)))


def training_tokens(source: Path, rows: int = 16, length: int = 256) -> Array:
    """Return the beginnings of modules that the model was trained on, spread over the library, [rows, length]."""
    session = graphopt.load(source)
    texts = list(training_texts().values())
    token_lists = (session.encode(text[: 20 * length]) for text in texts[:: max(1, len(texts) // (4 * rows))])
    return np.array([ids[:length] for ids in token_lists if len(ids) >= length][:rows], np.int64)


def make_models(folder: Path) -> dict[str, Path]:
    """Write the shipped model, canonical and with folded norms, as it is and with outliers; show what was planted."""
    console, float_artifact = Console(), folder / "exported"
    folders = {"untreated": folder / "untreated", "treated": folder / "treated"}
    graphopt.export("stdlib_lm", float_artifact)
    prepare = Recipe(name="prepare", steps=(Canonicalize(), FoldNorms()))
    graphopt.optimize(float_artifact, prepare, folders["untreated"])
    ids = training_tokens(float_artifact)
    plain, treated_artifact = (artifacts.read(folders["untreated"]) for _ in range(2))
    plant(treated_artifact.model, ids)
    before, after = logits_of(plain.model, ids), logits_of(treated_artifact.model, ids)
    change = float(np.abs(after - before).max() / np.abs(before).max())
    if change > 1e-3:
        raise GraphoptError(f"planting outliers moved the logits by {change:.1e} of the largest")
    artifacts.write(treated_artifact, folders["treated"])
    rotated_artifact = graphopt.optimize(treated_artifact, rotate(ROLES, 0))
    table = Table("max / rms: of a token, of channels", "untreated", "treated", "treated, all four rotations")
    columns = [peaks(model.model, ids) for model in (plain, treated_artifact, rotated_artifact)]
    for role in ROLES:
        table.add_row(role, *(f"{column[role][0]:.1f}, {column[role][1]:.1f}" for column in columns))
    console.print(f"planting moved the logits by {change:.1e} of the largest")
    console.print(table)
    return folders


def main(
    size: Annotated[int, typer.Option("--bytes", help="of the held-out text to judge on; 0 is all")] = 40_000,
    seed: Annotated[int, typer.Option(help="of the rotations")] = 0,
    group: Annotated[int, typer.Option(help="rows of a weight that share a scale")] = 64,
    clip: Annotated[float, typer.Option(help="share of a token's range that activations keep")] = 1.0,
    only: Annotated[list[str] | None, typer.Option(help="rotations to try, such as 'all four'; all by default")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the rows here too")] = None,
) -> None:
    """Plant outliers, rotate, quantize, judge: two tables, of the model with outliers and without."""
    text, console, rows = held_out_text(MODULES)[: size or None], Console(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, source in make_models(folder).items():
            floats = graphopt.evaluate(graphopt.load(source), text).bits_per_byte
            table = Table("rotations", *BITS, title=f"{name}: bits per byte above float32's {floats:.4f}")
            for label in track(only or ROTATIONS, f"{name}: rotations", console=Console(stderr=True)):
                roles = ROTATIONS[label]
                rotated_artifact: Artifact = (
                    graphopt.optimize(source, rotate(roles, seed)) if roles else artifacts.read(source)
                )
                losses = []
                for format_name, (bits, has_int4_cache) in BITS.items():
                    graphopt.optimize(
                        rotated_artifact,
                        quantize(bits, has_int4_cache, group, clip),
                        folder / "made",
                        overwrite=True,
                        force=True,
                    )
                    bits_per_byte = graphopt.evaluate(graphopt.load(folder / "made"), text).bits_per_byte
                    rows.append(
                        {
                            "model": name,
                            "rotations": label,
                            "format": format_name,
                            "bits_per_byte": bits_per_byte,
                            "float32": floats,
                        }
                    )
                    losses.append(bits_per_byte - floats)
                table.add_row(label, *(f"{figure:+.3f}" for figure in losses))
            console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
