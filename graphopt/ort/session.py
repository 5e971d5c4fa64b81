"""The only access to onnxruntime: import it with a clear message, open a session without its logging."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.errors import InputError, MissingDependencyError
from graphopt.graph.onnx_file import NEWEST_OPSET
from graphopt.runtime_ops import DOMAIN, OPERATORS, library_path

if TYPE_CHECKING:
    import onnxruntime

    from graphopt.util.targets import Device


ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"
"""Session entry that decides to what ``DequantizeLinear -> MatMul`` rounds activations: 0 float32, 4 int8 (default)."""

Entries = Mapping[str, str]
"""Session configuration entries of onnxruntime."""

NO_ENTRIES: Entries = MappingProxyType({})

_FEW_CALLS: Entries = MappingProxyType({"session.intra_op.allow_spinning": "0"})

AS_IT_LIES: Entries = MappingProxyType({"session.disable_prepacking": "1"})
"""Entries for a session whose weights are not packed in advance."""

_DATA_FOLDER = "session.model_external_initializers_file_folder_path"

PROVIDERS: dict[Device, tuple[str, ...]] = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""onnxruntime's providers for a device, the first choice first: a node that a GPU has no kernel for runs on the CPU."""

_PROVIDER_OPTIONS = {"CUDAExecutionProvider": {"enable_skip_layer_norm_strict_mode": "1"}}
"""Options of providers. Without this one SkipSimplifiedLayerNormalization sums up squares of float16 in float16, which
loses digits, and overflows where RMSNormalization does not."""

Array = npt.NDArray[Any]

_ERRORS_ONLY, _FATAL_ONLY = 3, 4

# onnxruntime's message for a node that has neither kernel nor body.
_UNKNOWN_OPERATOR = "is not a registered function/op"


def entries_of_few_calls(*, packs: bool) -> dict[str, str]:
    """Return entries for a session of few calls, or beside other work: threads that wait for work sleep.

    Args:
        packs: whether weights are packed in advance, as kernels for codes need it. Where all weights are floats, it
            takes longer than a few calls, and as much memory as the model again, which no file stands behind.
    """
    return {**_FEW_CALLS, **({} if packs else AS_IT_LIES)}


def import_onnxruntime() -> Any:
    """Return the ``onnxruntime`` module.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime is not installed", remedy='pip install "graphopt[cpu]", or "graphopt[gpu]" for NVIDIA GPUs'
        ) from error
    return onnxruntime


def open_session(  # noqa: PLR0913, what a session can be asked for
    path: Path,
    *,
    entries: Mapping[str, str] | None = None,
    threads: int = 0,
    optimized_to: Path | None = None,
    native: bool = True,
    device: Device = "cpu",
    rewritten: bool = True,
    profile: Path | None = None,
    content: bytes | None = None,
    in_place: bool = False,
) -> onnxruntime.InferenceSession:
    """Open an onnxruntime session.

    Args:
        path: the ``.onnx`` file; external data is looked for beside it.
        entries: session configuration entries, such as :data:`ACCURACY_LEVEL`.
        threads: intra-op threads; 0 lets onnxruntime choose.
        optimized_to: where onnxruntime writes the optimized graph that it runs.
        native: let graphopt's own kernels take the nodes of its operators, where they were built; else their bodies of
            standard operators run, and so they do where one of the nodes has no kernel.
        device: ``cuda``: the first NVIDIA GPU, by onnxruntime's CUDA provider.
        rewritten: let onnxruntime optimize the graph before it runs it; if false, nodes run as they are written.
        profile: what the name of a profile begins with, which onnxruntime writes when ``end_profiling`` is called.
        content: the model itself, in the place of the file's; its external data lies beside the file.
        in_place: the model names the files of its external data from the root of the disk on, as
            :func:`graphopt.graph.weights.data_file.save_model` writes it.

    Raises:
        InputError: onnxruntime refuses the file or the library of kernels; its message is included. For ``cuda``
            also: the provider does not start, or the file has nodes of our operators, ``native``, and the library for
            GPUs was not built.
        MissingDependencyError: onnxruntime is not installed, or has no provider for the device.
    """
    ort = import_onnxruntime()
    if device == "cuda":
        _check_cuda(ort, path, native)
    options = ort.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    options.intra_op_num_threads = threads
    if not rewritten:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if optimized_to is not None:
        options.optimized_model_filepath = str(optimized_to)
    model = path.read_bytes() if in_place and content is None else content
    if model is not None:
        options.add_session_config_entry(_DATA_FOLDER, path.absolute().anchor if in_place else str(path.parent))
    if native and not _lacks_kernels(path, model):
        _register_kernels(options, device)
    return _start(ort, path, str(path) if model is None else model, options, device)


def _register_kernels(options: Any, device: Device) -> None:
    """Let graphopt's kernels for a device take nodes, where they were built."""
    library = library_path(device)
    if library is None:
        return
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:
        raise InputError(f"onnxruntime cannot load graphopt's kernels: {error}", file=library) from error


def _start(ort: Any, path: Path, model: str | bytes, options: Any, device: Device) -> onnxruntime.InferenceSession:
    try:
        providers = [(name, _PROVIDER_OPTIONS.get(name, {})) for name in PROVIDERS[device]]
        session = ort.InferenceSession(model, options, providers=providers)
    except Exception as error:
        raise InputError(f"onnxruntime cannot load the model: {error}", file=path) from error
    # onnxruntime continues without a provider that does not start, and only logs it.
    if PROVIDERS[device][0] not in session.get_providers():
        raise InputError(
            f"onnxruntime cannot start its {PROVIDERS[device][0]}, and would run everything on the CPU",
            file=path,
            remedy="its log above names what is missing: a driver, CUDA or cuDNN of the version that it was built with",
        )
    return session


def _check_cuda(ort: Any, path: Path, native: bool) -> None:
    """Refuse what would silently run on the CPU, or by bodies."""
    provider = PROVIDERS["cuda"][0]
    if provider not in ort.get_available_providers():
        raise MissingDependencyError(
            f"this onnxruntime {ort.__version__} has no {provider}",
            remedy='remove onnxruntime and install the other build of it: pip install "graphopt[gpu]"',
        )
    if native and library_path("cuda") is None and _has_own_nodes(path):
        raise InputError(
            "the model has operators of graphopt, whose kernels for NVIDIA GPUs were not built",
            file=path,
            remedy="install from source where nvcc is found, with --config-settings=cmake.define.GRAPHOPT_CUDA=ON, or "
            "say native=False",
        )


def _lacks_kernels(path: Path, model: bytes | None) -> bool:
    """Return whether the kernels refuse a node of the model, which only its body computes: its overload says so."""
    parts = [part.encode() for operator in OPERATORS.values() for part in operator.without_kernel]
    if not parts or (model is None and not path.is_file()):
        return False
    content = path.read_bytes() if model is None else model
    return any(part in content for part in parts)


def _has_own_nodes(path: Path) -> bool:
    try:
        return any(node.domain == DOMAIN for node in ir.load(path).graph.all_nodes())
    except Exception:
        return False  # onnxruntime will report what is wrong with the file


def ort_value(array: Array) -> onnxruntime.OrtValue:
    """Return a value that shares the memory of ``array``, which must be contiguous.

    onnxruntime does not know the NumPy types of bfloat16 and float8, so the ONNX type is passed.
    """
    ort = import_onnxruntime()
    if array.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, int(ir.DataType.from_numpy(array.dtype)))


def array_of(value: onnxruntime.OrtValue) -> Array:
    """Return a copy of a tensor of onnxruntime, of any type that :func:`ort_value` takes."""
    dtype = ir.DataType(value.element_type()).numpy()
    if dtype.kind != "V":
        return np.array(value.numpy())
    memory = ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())
    return np.frombuffer(memory, dtype).reshape(value.shape()).copy()


def run(
    session: onnxruntime.InferenceSession,
    names: Sequence[str] | None,
    feeds: Mapping[str, Array],
    *,
    is_attempt: bool = False,
) -> list[Array]:
    """Return outputs of a session, all by default; like ``session.run``, but also for bfloat16 and float8.

    Args:
        session: the session.
        names: of the outputs.
        feeds: the inputs by name.
        is_attempt: whether a failure is expected, and not to be logged by onnxruntime.
    """
    options = None
    if is_attempt:
        options = import_onnxruntime().RunOptions()
        options.log_severity_level = _FATAL_ONLY
    if all(array.dtype.kind != "V" for array in feeds.values()):
        outputs: list[Array] = session.run(names, dict(feeds), options)
        return outputs
    values = session.run_with_ort_values(names, {name: ort_value(array) for name, array in feeds.items()}, options)
    return [array_of(value) for value in values]


def native_operators(device: Device = "cpu") -> frozenset[str]:
    """Return the operators of graphopt that the library of kernels for a device registers; none if it was not built.

    Each operator is probed with a node that has no body: onnxruntime reports it as unregistered if the library
    lacks it; otherwise it loads the node or reports another error.
    """
    library = library_path(device)
    return frozenset() if library is None else _probe_operators(library)


@functools.cache
def _probe_operators(library: Path) -> frozenset[str]:
    ort, names = import_onnxruntime(), set()
    for name, operator in OPERATORS.items():
        x = ir.val("x", ir.DataType.FLOAT, ["n"])
        node = ir.node(name, [x], domain=DOMAIN)
        node.outputs[0].name, node.outputs[0].dtype = "y", ir.DataType.FLOAT
        imports = {"": NEWEST_OPSET, DOMAIN: operator.version}
        model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports=imports, name=name), ir_version=10)
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.register_custom_ops_library(str(library))
        try:
            ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            if _UNKNOWN_OPERATOR in str(error):
                continue
        names.add(name)
    return frozenset(names)


@contextlib.contextmanager
def session_of(
    model: ir.Model, *, entries: Mapping[str, str] | None = None, native: bool = True, rewritten: bool = True
) -> Iterator[onnxruntime.InferenceSession]:
    """Open a session on a model in memory, through a temporary file that is removed afterwards.

    Args:
        model: the model.
        entries: as for :func:`open_session`.
        native: as for :func:`open_session`.
        rewritten: as for :func:`open_session`.
    """
    with tempfile.TemporaryDirectory(prefix="graphopt-") as folder:
        path = Path(folder) / "model.onnx"
        ir.save(model, path, external_data="model.onnx.data")
        yield open_session(path, entries=entries, native=native, rewritten=rewritten)
