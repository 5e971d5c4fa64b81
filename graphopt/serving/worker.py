"""A worker: the Engine as Dynamo's front asks for it, in tokens. ``python -m graphopt.serving.worker FOLDER``.

Dynamo finds workers by what it calls discovery: files on one machine, etcd or Kubernetes on several. The front's name
for the protocol is ``LLMEngine``; the methods below are what its Rust side calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphopt.errors import InputError
from graphopt.inference.conversation.template import ChatTemplate
from graphopt.serving.batch import Batch
from graphopt.serving.beginnings import BEGINNINGS, read_first
from graphopt.serving.etcd import Etcd
from graphopt.serving.journal import Journal
from graphopt.serving.process import NAMESPACE, end_with_parent, watch_connections
from graphopt.serving.request import Limits, tokens_of, turn_of
from graphopt.serving.stream import Event, Stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

_LOOK = 0.05  # seconds between two looks at what is left
_MOVING = 60.0  # seconds that a request which moves to another worker may take
CRASH_EXIT_CODE = 70
"""Exit code of a worker whose Engine can no longer go on."""


class Worker:
    """What Dynamo calls an ``LLMEngine``.

    Args:
        folder: an artifact with the graph of the step ``serve``.
        name: what clients call the model.
        journal: what the workers share.
        state: folder with what to read first (:data:`graphopt.serving.beginnings.BEGINNINGS`), in which this process
            says which instance of Dynamo's it is, see :func:`instance_file`.
        threads: of onnxruntime; 0 lets it choose.
        patience: seconds that requests have to end after SIGTERM; then they move to another worker.
    """

    def __init__(self, folder: Path, name: str, journal: Journal, state: Path, threads: int, patience: float) -> None:
        self._folder, self._name, self._journal, self._threads = folder, name, journal, threads
        self._state, self._patience, self._is_closing = state, patience, False
        self._limits = Limits.of_folder(folder)
        self._batch: Batch | None = None
        self._streams: dict[str, Stream] = {}

    async def start(self, worker_id: int) -> Any:
        """Load the model, read what prompts begin with, and say what it can take."""
        from dynamo._core import backend

        instance_file(self._state, os.getpid()).write_text(str(worker_id))
        self._batch = await asyncio.to_thread(Batch, self._folder, threads=self._threads, on_failure=self._fail)
        await asyncio.to_thread(read_first, self._batch, json.loads((self._state / BEGINNINGS).read_text()))
        limits = self._limits
        registration = backend.LlmRegistration(
            context_length=limits.positions,
            kv_cache_block_size=limits.block,
            total_kv_blocks=limits.blocks,
            max_num_seqs=limits.requests,
            max_num_batched_tokens=limits.tokens,
        )
        return backend.EngineConfig(model=str(self._folder), served_model_name=self._name, llm=registration)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Give the tokens of a request, and at last why they end and how many there were.

        Raises:
            InvalidArgument: the request cannot be done, which clients see as status 400.
        """
        from dynamo._core import InvalidArgument

        assert self._batch is not None
        try:
            async with contextlib.aclosing(self._generate(self._batch, request, context.id())) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (ValueError, InputError) as error:
            raise InvalidArgument(str(error)) from error

    async def _generate(self, batch: Batch, request: dict[str, Any], name: str) -> AsyncGenerator[dict[str, Any]]:
        from dynamo._core import EngineShutdown

        tokens = tokens_of(request, self._limits)
        turn_of(request, self._limits, tokens)  # what cannot be done is refused before anything is written down
        seed = (request.get("sampling_options") or {}).get("seed")
        fresh_seed = secrets.randbits(31) if seed is None else int(seed)
        entry = await asyncio.to_thread(self._journal.take, name, len(tokens), fresh_seed)
        turn = turn_of(request, self._limits, tokens, min(entry.prompt, len(tokens)), entry.seed)
        events: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        stream = batch.begin(turn, deliver)
        self._streams[name] = stream
        count, event = 0, Event(finish="cancelled")
        try:
            while (event := await events.get()).finish is None:
                if not count:
                    await asyncio.to_thread(self._journal.note_token, name)
                count += 1
                yield {"token_ids": [event.token], "index": 0}
            if event.finish == "error":
                raise ValueError(event.message)
            if event.finish == "cancelled" and self._is_closing:
                raise EngineShutdown("this worker ends")
            usage = {
                "prompt_tokens": len(tokens),
                "completion_tokens": count,
                "total_tokens": len(tokens) + count,
                "prompt_tokens_details": {"cached_tokens": event.cached_tokens},
            }
            yield {"token_ids": [], "index": 0, "finish_reason": event.finish, "completion_usage": usage}
        finally:
            batch.cancel(stream)
            self._streams.pop(name, None)
            # Where this worker ends, another one goes on soon; where the client has gone, nobody does.
            moving = _MOVING if event.finish == "cancelled" else 0
            loop.call_later(moving, loop.run_in_executor, None, self._journal.end, name)

    async def abort(self, context: Any) -> None:
        """End a request whose client has gone."""
        stream = self._streams.get(context.id())
        if stream is not None and self._batch is not None:
            self._batch.cancel(stream)

    async def cleanup(self) -> None:
        """Let requests end, and then the Engine go. Those that are left move: the front gets the error for it."""
        end = time.monotonic() + self._patience
        while self._streams and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        self._is_closing = True
        batch, self._batch = self._batch, None
        if batch is not None:
            await asyncio.to_thread(batch.close)

    def _fail(self, error: Exception) -> None:
        """End the process: the front moves its requests to another worker."""
        self._journal.note_crash(str(error))
        sys.stderr.write(f"the engine cannot go on: {error}\n")
        sys.stderr.flush()
        os._exit(CRASH_EXIT_CODE)

    async def register_prometheus(self, metrics: Any) -> None:
        """Let ``/metrics`` of this worker say what its batch measures."""
        metrics.register_prometheus_expfmt_callback(self._exposition)

    def _exposition(self) -> str:
        """Return Prometheus's text: https://prometheus.io/docs/instrumenting/exposition_formats/."""
        lines = []
        for name, (kind, text, value) in (self._batch.figures() if self._batch else {}).items():
            title = f"graphopt_worker_{name}"
            lines += [f"# HELP {title} {text}", f"# TYPE {title} {kind}", f"{title} {value}"]
        return "\n".join((*lines, ""))

    # What else the protocol asks for, and this worker has not.

    async def is_quiescent(self) -> bool | None:
        """Nothing is moved between devices."""
        return None

    def component_metrics_dp_ranks(self) -> list[int]:
        """There are no figures of parallel parts."""
        return []

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """The front counts what it sent itself."""

    async def health_check_payload(self) -> dict[str, Any] | None:
        """An idle worker is not probed: it ends when its Engine does."""
        return None

    async def kv_event_sources(self) -> list[Any]:
        """The Engine does not say which blocks it keeps."""
        return []

    async def logits_processor_spec(self) -> None:
        """Logits stay in the Engine."""

    def supported_controls(self) -> set[str]:
        """There are none."""
        return set()

    def supported_updates(self) -> set[str]:
        """There are none."""
        return set()

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Nothing else is registered."""


def instance_file(state: Path, process: int) -> Path:
    """Return the file in which a worker writes which instance it is; with etcd that is the lease of its entries."""
    return state / f"instance-{process}"


def offered_by(folder: Path) -> list[str]:
    """Return what a model can be asked for: completions, and chat where it has a template."""
    try:
        ChatTemplate.of_folder(folder)
    except InputError:
        return ["completions"]
    return ["chat", "completions"]


async def _serve(options: argparse.Namespace) -> None:
    from dynamo._core import backend
    from dynamo.llm import ModelInput
    from dynamo.runtime.logging import configure_dynamo_logging

    configure_dynamo_logging()
    journal = Journal(options.state, Etcd(os.environ) if options.discovery == "etcd" else None)
    journal.watch()
    worker = Worker(options.folder, options.name, journal, options.state, options.threads, options.patience)
    runtime = backend.RuntimeConfig(discovery_backend=options.discovery, request_plane="tcp")
    config = backend.WorkerConfig(
        namespace=NAMESPACE,
        model_name=str(options.folder),
        served_model_name=options.name,
        model_input=ModelInput.Tokens,
        endpoint_types=",".join(offered_by(options.folder)),
        tool_call_parser=options.tool_parser,
        enable_local_indexer=False,
        enable_kv_routing=False,
        runtime=runtime,
    )
    await backend.Worker(worker, config, asyncio.get_running_loop()).run()


def main() -> None:
    """Serve until SIGTERM; requests that are on their way end first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--discovery", default="file")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--tool-parser")
    end_with_parent()
    watch_connections()
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
