"""onnxruntime-genai's Engine as streams of tokens: requests come and go, and a full pool never stands still.

The Engine batches, shares blocks of common prefixes and feeds long prompts in pieces. What it leaves to its caller is
here: a thread that owns it, and room for requests that together grow past the pool. Then the youngest gives its blocks
back and waits until another one ends; it goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import queue
import threading
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.artifact.genai import GENAI_CONFIG
from graphopt.artifact.hf_config import json_object
from graphopt.serving.stream import Event, Stream, Turn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_EVENTS = 64
_STUCK = 2  # runs in which nothing moved, before a request has to leave


class Batch:
    """The Engine on a thread of its own.

    Args:
        folder: an artifact with the graph of the step ``serve``.
        threads: of onnxruntime; 0 lets it choose.
        on_failure: called on the Engine's thread with the error after which it cannot go on.

    Raises:
        Exception: what onnxruntime-genai raises where it cannot load the folder.
    """

    def __init__(self, folder: Path, *, threads: int = 0, on_failure: Callable[[Exception], None]) -> None:
        self._folder, self._threads, self._on_failure = folder, threads, on_failure
        self._commands: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._running: dict[Any, Stream] = {}  # by the Engine's request
        self._waiting: list[Stream] = []
        self._count = self._stuck = 0
        self._sums: Counter[str] = Counter()
        batching = json_object(folder / GENAI_CONFIG).get("engine", {}).get("dynamic_batching", {})
        self._block, self._blocks = int(batching.get("block_size", 16)), int(batching.get("num_blocks", 0))
        ready: Future[int] = Future()
        self._thread = threading.Thread(target=self._run_engine, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        self._max_running = ready.result()

    def begin(self, turn: Turn, deliver: Callable[[Event], None]) -> Stream:
        """Begin a stream; ``deliver`` gets its events, the last with ``finish``. Callable from any thread."""
        stream = Stream(turn, deliver, output=list(turn.prior_tokens))
        self._commands.put(lambda: self._arrive(stream))
        return stream

    def cancel(self, stream: Stream) -> None:
        """End a stream and give its blocks back; nothing happens where it has ended. Callable from any thread."""
        self._commands.put(lambda: self._leave(stream))

    def figures(self) -> dict[str, tuple[str, str, int]]:
        """Return what can be measured, by its name: its kind in Prometheus, what it is, and its value.

        Callable from any thread. Blocks that requests share count for each of them.
        """
        running = list(self._running.values())
        blocks = min(self._blocks, sum(map(self._blocks_of, running)))
        figures = {
            "requests_running": ("gauge", "requests in the batch", len(running)),
            "requests_waiting": (
                "gauge",
                "requests that wait for room in the batch or in the pool",
                len(self._waiting),
            ),
            "blocks": ("gauge", "blocks of the pool", self._blocks),
            "blocks_used": ("gauge", "blocks that the requests in the batch fill", blocks),
        }
        sums = {
            "requests_total": "requests that came",
            "requests_moved_total": "requests that another worker had begun",
            "requests_deferred_total": "times that a request had to leave a full pool",
            "requests_failed_total": "requests that ended by an error",
            "prompt_tokens_total": "tokens of prompts that ended",
            "cached_prompt_tokens_total": "tokens of those that the pool had",
            "tokens_total": "tokens that were made",
        }
        return figures | {name: ("counter", text, self._sums[name]) for name, text in sums.items()}

    def close(self) -> None:
        """Cancel all streams and let the Engine go."""
        self._commands.put(lambda: False)
        self._thread.join()

    def _run_engine(self, ready: Future[int]) -> None:
        import onnxruntime_genai

        self._genai = onnxruntime_genai
        onnxruntime_genai.disable_telemetry_events()
        try:
            config = onnxruntime_genai.Config(str(self._folder))
            if self._threads:
                options = {"intra_op_num_threads": self._threads}
                config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
            self._engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(config))
            buffer = self._engine.create_event_buffer(_EVENTS)
            ready.set_result(self._engine.get_capabilities().configured_max_batch_size)
        except Exception as error:
            return ready.set_exception(error)
        try:
            while self._obey():
                self._admit()
                if self._running:
                    self._hear(self._engine.run(buffer))
        except Exception as error:
            self._on_failure(error)
        for stream in [*self._running.values(), *self._waiting]:
            self._end(stream, Event(finish="cancelled"))

    def _obey(self) -> bool:
        """Do what was asked since; wait for it where there is nothing else to do."""
        going = True
        while going and not (self._commands.empty() and (self._running or self._waiting)):
            going = self._commands.get()()
        return going

    def _arrive(self, stream: Stream) -> bool:
        self._count += 1
        stream.number = self._count
        self._sums["requests_total"] += 1
        self._sums["requests_moved_total"] += bool(stream.turn.prior_tokens)
        self._waiting.append(stream)
        return True

    def _leave(self, stream: Stream) -> bool:
        if stream in self._waiting or stream.request is not None:
            self._end(stream, Event(finish="cancelled"))
        return True

    def _admit(self) -> None:
        self._waiting.sort(key=lambda stream: stream.number)
        while self._waiting and len(self._running) < self._max_running and self._fits(self._waiting[0]):
            self._start(self._waiting.pop(0))

    def _fits(self, stream: Stream) -> bool:
        """Return whether to give a stream to the Engine, which itself defers new ones that have no room.

        One that had to leave once comes back when it would not have to leave at once. Shared blocks count for each
        request that has them, so this may be late, but never too late: the last one that runs needs no permission.
        """
        if not stream.is_deferred or not self._running:
            return True
        return sum(map(self._blocks_of, self._running.values())) + self._blocks_of(stream) + 1 <= self._blocks

    def _blocks_of(self, stream: Stream) -> int:
        return -(-stream.tokens // self._block)

    def _start(self, stream: Stream) -> None:
        turn = stream.turn
        stream.replay_count = len(stream.output) if turn.replays else 0
        tokens = turn.prompt if turn.replays else (*turn.prompt, *stream.output)
        # known tokens have no room left beside them
        count = 0 if turn.replays else len(stream.output)
        if len(stream.output) >= turn.limit:
            return stream.deliver(Event(finish="length"))
        stream.request, stream.turn_id = self._engine.create_request(), None
        self._running[stream.request] = stream
        try:
            options = self._genai.TurnOptions(stream.request)
            options.set_max_generated_tokens(turn.limit - count)
            options.set_min_generated_tokens(max(0, turn.min_tokens - count))
            options.set_do_sample(turn.temperature > 0)
            if turn.temperature > 0:
                options.set_temperature(turn.temperature)
                options.set_top_k(turn.top_k)
                options.set_top_p(turn.top_p)
                options.set_seed(turn.seed)
            if turn.repetition_penalty != 1:
                options.set_repetition_penalty(turn.repetition_penalty)
            if turn.guidance is not None:
                options.set_guidance(*turn.guidance)
            stream.turn_id = stream.request.begin_turn(np.array(tokens, np.int32), options)
        except Exception as error:
            self._end(stream, Event(finish="error", message=str(error)))

    def _hear(self, events: Any) -> None:
        flags = self._genai.EngineEventFlags
        has_moved = is_blocked = False
        for event in events or ():
            is_blocked |= bool(event.flags & flags.CAPACITY_BLOCKED)  # of the whole batch: no request is named
            stream = self._running.get(event.request)
            if stream is None:
                continue
            if event.flags & flags.TOKEN:
                has_moved = True
                self._token(stream, event.token)
            if event.flags & flags.FAILED:
                has_moved = True
                self._handle_failure(stream, event)
            elif event.flags & flags.TURN_FINISHED:
                has_moved = True
                self._end(stream, self._last(stream, event))
        self._stuck = self._stuck + 1 if is_blocked and not has_moved else 0
        if self._stuck >= _STUCK:
            self._make_room()

    def _token(self, stream: Stream, token: int) -> None:
        if stream.replay_count:
            stream.replay_count -= 1
            return
        stream.output.append(token)
        self._sums["tokens_total"] += 1
        stream.deliver(Event(token))

    def _last(self, stream: Stream, event: Any) -> Event:
        reasons = self._genai.FinishReason
        finish = {
            reasons.EOS: "stop",
            reasons.STOP_STRING: "stop",
            reasons.MAX_GENERATED_TOKENS: "length",
            reasons.MAX_SESSION_TOKENS: "length",
        }.get(event.finish_reason, "cancelled")
        cached_tokens = event.usage.cached_prompt_tokens if event.usage else 0
        self._sums["prompt_tokens_total"] += len(stream.turn.prompt)
        self._sums["cached_prompt_tokens_total"] += cached_tokens
        return Event(finish=finish, cached_tokens=cached_tokens)

    def _handle_failure(self, stream: Stream, event: Any) -> None:
        codes = self._genai.EngineErrorCode
        if event.error_code in (codes.ENGINE_EXECUTION_FAILURE, codes.ENGINE_CONTRACT_FAILURE):
            raise RuntimeError(f"the engine is no longer healthy: {event.error_code.name}")
        if event.flags & self._genai.EngineEventFlags.RETRYABLE:
            return self._set_aside(stream, f"the engine gave up: {event.error_code.name}")
        return self._end(stream, Event(finish="error", message=f"the engine gave up: {event.error_code.name}"))

    def _make_room(self) -> None:
        """Let the youngest requests give their blocks back, until each other one can have one more."""
        self._stuck = block_count = 0
        while block_count < len(self._running):
            youngest = max(self._running.values(), key=lambda stream: stream.number)
            block_count += self._blocks_of(youngest)
            self._set_aside(youngest, "the pool of blocks is too small for it")

    def _set_aside(self, stream: Stream, message: str) -> None:
        """Let a request wait until another one ends; where there is none, it ends by the error ``message``."""
        if len(self._running) == 1:
            return self._end(stream, Event(finish="error", message=message))
        self._release(stream)
        stream.is_deferred = True
        self._sums["requests_deferred_total"] += 1
        self._waiting.append(stream)
        return None

    def _end(self, stream: Stream, event: Event) -> None:
        if stream in self._waiting:
            self._waiting.remove(stream)
        self._release(stream)
        self._sums["requests_failed_total"] += event.finish == "error"
        stream.deliver(event)

    def _release(self, stream: Stream) -> None:
        """Take a stream out of the Engine: a request holds its slot and its blocks until it is closed."""
        request, stream.request = stream.request, None
        if request is None:
            return
        del self._running[request]
        if stream.turn_id is not None:
            request.cancel_turn(stream.turn_id)
        request.close()
