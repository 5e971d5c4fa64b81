"""The front: an OpenAI-compatible address, written in Rust by NVIDIA Dynamo. ``python -m graphopt.serving.front``.

It renders chat templates, tokenizes, streams, finds workers, and moves the requests of one that died to another.
"""

from __future__ import annotations

import argparse
import asyncio
import signal

from graphopt.serving.process import NAMESPACE, end_with_parent

MOVES = 3
"""How often a request moves to another worker at most."""


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
    )
    await run_input(runtime, "http", await make_engine(runtime, arguments))


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--discovery", default="file")
    end_with_parent()
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
