"""The front: an OpenAI-compatible address, written in Rust by NVIDIA Dynamo. ``python -m graphopt.serving.front``.

It renders chat templates, tokenizes, streams, finds workers, and moves the requests of one that died to another.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from typing import Any

from graphopt.serving.process import NAMESPACE, end_with_parent, watch_connections

MOVES = 3
"""How often a request moves to another worker at most."""


ROUTINGS = ("prefix", "turns", "random")
"""How a worker is chosen: the one that has read most of the prompt and is not busy, one after the other, or any."""

READING = 4.0
"""How much more a block of a prompt that a worker must read counts than one that its requests hold.

On processors reading is what takes time. With 1 requests left the worker that had their prefix as soon as it was a
little busier than the other: `tools/bench/hosts.py prefixes` counted 1.3 times the tokens.
"""


def _router(routing: str) -> Any:
    from dynamo.llm import KvRouterConfig, RouterConfig, RouterMode

    if routing == "prefix":
        # The Engine says nothing of its blocks, so the front remembers what it sent where, for two minutes.
        return RouterConfig(RouterMode.KV, KvRouterConfig(use_kv_events=False, prefill_load_scale=READING))
    return RouterConfig(RouterMode.Random if routing == "random" else RouterMode.RoundRobin)


async def _serve(options: argparse.Namespace) -> None:
    from dynamo.llm import EngineType, EntrypointArgs, make_engine, run_input
    from dynamo.runtime import DistributedRuntime
    from dynamo.runtime.logging import configure_dynamo_logging

    configure_dynamo_logging()
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, options.discovery, "tcp")
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runtime.shutdown)
    arguments = EntrypointArgs(
        EngineType.Dynamic,
        http_host=options.host,
        http_port=options.port,
        namespace=NAMESPACE,
        migration_limit=MOVES,
        router_config=_router(options.routing),
    )
    await run_input(runtime, "http", await make_engine(runtime, arguments))


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--discovery", default="file")
    parser.add_argument("--routing", choices=ROUTINGS, default=ROUTINGS[0])
    end_with_parent()
    options = parser.parse_args()
    watch_connections(options.port)
    asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
