"""Serving over several hosts, each a network namespace of this machine: streams that survive, prompts that are reused.

    python tools/bench/hosts.py streams SERVED      # hosts are killed, cut off, ended and added under 32 streams
    python tools/bench/hosts.py registry SERVED     # etcd is killed under 32 streams, and comes back or not
    python tools/bench/hosts.py prefixes SERVED     # prompt tokens that are computed, by how requests are routed

SERVED is what `graphopt optimize --add serve` made. Run it as root, with etcd (Debian's `etcd-server`) and iproute2.
The front with etcd is one host, workers are on others, and each has an address and a link to the front's bridge. All
share this machine's processors. Nothing outside of the namespaces is touched.

``streams`` and ``registry`` compare every text with that of the same servers undisturbed: every second one is sampled
with a seed, the others are greedy. A silence is a time in which a stream received nothing, including the wait for its
first token. ``prefixes`` sends every newly started front the same requests: 8 prefixes, as many requests with each, in
one random order.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

# Run as a script, Python looks for modules in tools/ only.
sys.path.insert(0, str(Path(__file__).parents[2]))
from graphopt.artifact.genai import GENAI_CONFIG
from tools.bench.parts.machine import OtherLoad, describe, quiet
from tools.bench.parts.options import JsonFile
from tools.bench.parts.unavailable import UnavailableError

ROOT = Path(__file__).parents[2]
FRONT, PORT, ETCD = "10.77.0.1", 8000, "http://10.77.0.1:2379"
NEWNET = 0x40000000  # sched.h: CLONE_NEWNET
NAME = "model"
PATIENCE = 120.0  # seconds until a host must serve
app = typer.Typer(help=__doc__)


@dataclass
class Stream:
    """What a client received.

    Attributes:
        text: of the reply.
        arrivals: seconds since the Unix epoch of the request, of each part, and of the end.
        error: what went wrong, or nothing.
        prompt_tokens: of the prompt.
        cached_tokens: tokens of the prompt that the worker had in its cache.
    """

    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def silence(self) -> float:
        """The longest time without a part, in seconds."""
        return max(
            (later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0
        )


class Hosts:
    """The front's host, which is that of this process, and hosts of workers, each with a link to it.

    Args:
        model_folder: the model's folder.
        work: for logs, and etcd's data.
    """

    def __init__(self, model_folder: Path, work: Path) -> None:
        self._model_folder, self._work = model_folder.resolve(), work
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._numbers: dict[str, int] = {}
        if ctypes.CDLL(None, use_errno=True).unshare(NEWNET):
            raise UnavailableError(
                f"no network namespace of its own: {os.strerror(ctypes.get_errno())}; run it as root"
            )
        for command in (
            "link set lo up",
            "link add name bridge0 type bridge",
            f"addr add {FRONT}/24 dev bridge0",
            "link set bridge0 up",
        ):
            _ip(command)

    def start_etcd(self) -> None:
        """Start etcd on the front's host."""
        if shutil.which("etcd") is None:
            raise UnavailableError("etcd is not installed: apt-get install etcd-server")
        command = ["etcd", "--data-dir", str(self._work / "etcd"), "--listen-peer-urls", "http://127.0.0.1:0"]
        self._run("etcd", [*command, "--listen-client-urls", ETCD, "--advertise-client-urls", ETCD])
        _wait(lambda: _get(f"{ETCD}/health") is not None, "etcd does not answer")

    def lose_etcd(self) -> None:
        """Kill etcd, and wait for its end."""
        self.kill("etcd", signal.SIGKILL)
        self._processes["etcd"].wait()

    def forget_etcd(self) -> None:
        """Delete the data of an etcd that was killed."""
        shutil.rmtree(self._work / "etcd")

    def start_front(self, routing: str) -> None:
        """Start a front."""
        options = ["--replicas", "0", "--host", FRONT, "--port", str(PORT), "--address", FRONT, "--routing", routing]
        self._run("front", [*_GRAPHOPT, "serve", *options, "--discovery", "etcd"])

    def add(self, name: str) -> None:
        """Start a worker on a host, which gets a namespace and a link the first time."""
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers) + 2
            _ip(f"netns add {_namespace(name)}")
            _ip(f"link add to-{name} type veth peer name eth0 netns {_namespace(name)}")
            _ip(f"link set to-{name} master bridge0 up")
            for command in (f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up", "link set lo up"):
                _ip(f"-n {_namespace(name)} {command}")
        options = ["--no-front", "--discovery", "etcd", "--threads", "1", "--address", self.address(name)]
        in_namespace = ["ip", "netns", "exec", _namespace(name)]
        self._run(
            name,
            [
                *in_namespace,
                *_GRAPHOPT,
                "serve",
                str(self._model_folder),
                "--name",
                NAME,
                *options,
                "--metrics-port",
                "9100",
            ],
        )

    def address(self, name: str) -> str:
        """Return the address of a host."""
        return f"10.77.0.{self._numbers[name]}"

    def link(self, name: str, state: str) -> None:
        """Set the link of a host ``up`` or ``down``."""
        _ip(f"link set to-{name} {state}")

    def kill(self, name: str, number: int) -> None:
        """Send a signal to the server on a host; SIGKILL goes to its worker at the same moment."""
        process = self._processes[name]
        workers = []
        if number == signal.SIGKILL:
            workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, workers)):
            os.kill(pid, number)

    def wait_for(self, names: Sequence[str]) -> None:
        """Wait until the front lists one worker of each of these hosts, and no other one."""
        addresses = sorted(self.address(name) for name in names)

        def is_listed() -> bool:
            health = _get(f"http://{FRONT}:{PORT}/health")
            return health is not None and addresses == sorted(re.findall(r'"tcp":"([0-9.]+):', health))

        _wait(is_listed, f"the front does not list just {', '.join(names)}: see {self._work}")
        _wait(lambda: '"id"' in (_get(f"http://{FRONT}:{PORT}/v1/models") or ""), "the front offers no model")

    def metrics(self, name: str = "front") -> dict[str, float]:
        """Return the sum of each metric of a front, or of a worker, over its labels."""
        endpoint = f"{FRONT}:{PORT}" if name == "front" else f"{self.address(name)}:9100"
        sums: dict[str, float] = {}
        for line in (_get(f"http://{endpoint}/metrics") or "").splitlines():
            if line and not line.startswith("#"):
                key, value = line.rsplit(" ", 1)
                sums[key.split("{")[0]] = sums.get(key.split("{")[0], 0.0) + float(value)
        return sums

    def close(self) -> None:
        """End all processes and wait for them, so that their time does not count as that of other processes."""
        for process in self._processes.values():
            process.terminate()
        end = time.monotonic() + 30
        for name, process in self._processes.items():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(name, signal.SIGKILL)
                process.wait()
        for name in self._numbers:
            _ip(f"netns del {_namespace(name)}")
        self._processes, self._numbers = {}, {}

    def stop(self, *names: str) -> None:
        """End processes by SIGTERM and wait for them."""
        for name in names:
            self._processes[name].send_signal(signal.SIGTERM)
        for name in names:
            self._processes.pop(name).wait(PATIENCE)

    def _run(self, name: str, command: Sequence[str]) -> None:
        if name in self._processes:
            self._processes[name].wait()
        environment = os.environ | {"ETCD_ENDPOINTS": ETCD, "PYTHONPATH": str(ROOT)}
        with (self._work / f"{name}.log").open("a") as log:
            self._processes[name] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=self._work, start_new_session=True
            )


_GRAPHOPT = (sys.executable, "-c", "from graphopt.cli import main; main()")


def _namespace(name: str) -> str:
    return f"graphopt-{os.getpid()}-{name}"


def _ip(command: str) -> None:
    result = subprocess.run(["ip", *command.split()], capture_output=True, text=True)
    if result.returncode:
        raise UnavailableError(f"ip {command}: {result.stderr.strip()}")


def _get(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bytes(answer.read()).decode()
    except OSError:
        return None


def _wait(is_so: Callable[[], bool], problem: str) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > end:
            raise UnavailableError(problem)
        time.sleep(0.1)


@contextlib.contextmanager
def _hosts(model_folder: Path) -> Iterator[Hosts]:
    with tempfile.TemporaryDirectory(prefix="graphopt-hosts-", ignore_cleanup_errors=True) as work:
        hosts = Hosts(model_folder, Path(work))
        try:
            hosts.start_etcd()
            yield hosts
        finally:
            hosts.close()


async def _ask(
    prompt: list[int], tokens: int, on_part: Callable[[], None] = lambda: None, seed: int | None = None
) -> Stream:
    """Read a stream to its end or error; with a seed its tokens are sampled."""
    stream = Stream(arrivals=[time.time()])
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {} if seed is None else {"temperature": 0.8, "seed": seed}
    data = json.dumps(body).encode()
    is_whole = False
    try:
        reader, writer = await asyncio.open_connection(FRONT, PORT)
        head = "POST /v1/completions HTTP/1.1\r\nHost: front\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = (await reader.readline()).decode()
        if " 200 " not in status:
            stream.error = f"{status.strip()}: {(await reader.read()).decode()[-300:]}"
            is_whole = True
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                is_whole = True
            elif line.startswith(b"data: {"):
                part = json.loads(line[6:])
                stream.error = part.get("message", "") if "choices" not in part else stream.error
                if part.get("choices"):
                    stream.text += part["choices"][0]["text"]
                    stream.arrivals.append(time.time())
                    on_part()
                if usage := part.get("usage"):
                    stream.prompt_tokens = usage["prompt_tokens"]
                    stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        writer.close()
    except OSError as error:
        stream.error = str(error)
    if not is_whole and not stream.error:
        stream.error = "the stream ended without its last part"
    stream.arrivals.append(time.time())
    return stream


async def _ask_all(prompts: list[list[int]], tokens: int, disturb: Callable[[], None]) -> tuple[list[Stream], float]:
    """Send all requests at once; call ``disturb`` after a quarter of all tokens; return streams and its time."""
    count, moment = 0, 0.0

    def on_part() -> None:
        nonlocal count, moment
        count += 1
        if count == len(prompts) * tokens // 4:
            moment = time.time()
            asyncio.get_running_loop().run_in_executor(None, disturb)

    seeds = [number if number % 2 else None for number in range(len(prompts))]
    requests = (_ask(prompt, tokens, on_part, seed) for prompt, seed in zip(prompts, seeds, strict=True))
    return list(await asyncio.gather(*requests)), moment


def _prompts(model_folder: Path, count: int, length: int) -> list[list[int]]:
    vocabulary = json.loads((model_folder / GENAI_CONFIG).read_text())["model"]["vocab_size"]
    generator = random.Random(0)
    return [[generator.randrange(1, vocabulary) for _ in range(length)] for _ in range(count)]


@app.command()
def streams(
    folder: Annotated[Path, typer.Argument(metavar="SERVED")],
    count: Annotated[int, typer.Option(help="streams at once")] = 32,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 400,
    json_file: JsonFile = None,
) -> None:
    """Disturb hosts while streams run."""
    with _hosts(folder) as hosts:

        def cut_for_five_seconds() -> None:
            hosts.link("a", "down")
            time.sleep(5)
            hosts.link("a", "up")

        def mend_link() -> None:
            hosts.link("a", "up")

        def add_again() -> None:
            hosts.add("a")

        disturbances = [
            Disturbance("nothing"),
            Disturbance("nothing again"),
            Disturbance("a host is killed: SIGKILL", lambda: hosts.kill("a", signal.SIGKILL), "b", add_again),
            Disturbance("a link is down for 5 s", cut_for_five_seconds),
            Disturbance("a link is down for good", lambda: hosts.link("a", "down"), "b", mend_link),
            Disturbance("a host is ended: SIGTERM", lambda: hosts.kill("a", signal.SIGTERM), "b", add_again),
            Disturbance("a third host joins", lambda: hosts.add("c"), "abc", hosts_mended="abc"),
        ]
        _try_all(hosts, disturbances, _prompts(folder, count, 24), tokens, json_file)


@app.command()
def registry(
    folder: Annotated[Path, typer.Argument(metavar="SERVED")],
    count: Annotated[int, typer.Option(help="streams at once")] = 32,
    tokens: Annotated[int, typer.Option(help="of each reply")] = 400,
    json_file: JsonFile = None,
) -> None:
    """Disturb etcd while streams run: they do not need it, and hosts that join do."""
    with _hosts(folder) as hosts:

        def lose_for(seconds: float, forget: bool = False) -> None:
            hosts.lose_etcd()
            if forget:
                hosts.forget_etcd()
            time.sleep(seconds)
            hosts.start_etcd()

        def lose_and(begin: Callable[[], None]) -> None:
            hosts.lose_etcd()
            begin()

        def start_and_add(name: str) -> None:
            hosts.start_etcd()
            hosts.add(name)

        disturbances = [
            Disturbance("nothing"),
            Disturbance("etcd is away for 3 s", lambda: lose_for(3)),
            Disturbance("etcd is away for 20 s", lambda: lose_for(20)),
            Disturbance("etcd comes back without its data", lambda: lose_for(3, forget=True)),
            # the front reads etcd when a client asks for its list
            Disturbance("etcd is killed for good", hosts.lose_etcd, None, hosts_mended=None),
            Disturbance("etcd is still away", hosts_after=None, mend=hosts.start_etcd),
            Disturbance(
                "etcd and a host are killed",
                lambda: lose_and(lambda: hosts.kill("a", signal.SIGKILL)),
                None,
                lambda: start_and_add("a"),
            ),
            Disturbance(
                "a host joins without etcd",
                lambda: lose_and(lambda: hosts.add("c")),
                None,
                lambda: start_and_add("c"),
                "abc",
            ),
        ]
        _try_all(hosts, disturbances, _prompts(folder, count, 24), tokens, json_file)


@dataclass(frozen=True)
class Disturbance:
    """What happens while streams run.

    Attributes:
        title: of its row.
        begin: causes it.
        hosts_after: hosts that the front lists afterwards; ``None`` where that is not checked.
        mend: undoes it.
        hosts_mended: hosts that the front lists then, or ``None``.
    """

    title: str
    begin: Callable[[], None] = lambda: None
    hosts_after: str | None = "ab"
    mend: Callable[[], None] = lambda: None
    hosts_mended: str | None = "ab"


def _try_all(
    hosts: Hosts,
    disturbances: Sequence[Disturbance],
    prompts: list[list[int]],
    tokens: int,
    json_file: Path | None,
) -> None:
    console, load = Console(width=120), OtherLoad()
    rows: list[dict[str, Any]] = []
    hosts.start_front("prefix")
    for name in "ab":
        hosts.add(name)
    hosts.wait_for("ab")
    reference_texts: list[str] = []
    for disturbance in disturbances:
        before = hosts.metrics()
        replies, moment = asyncio.run(_ask_all(prompts, tokens, disturbance.begin))
        reference_texts = reference_texts or [stream.text for stream in replies]
        migrations = _difference(before, hosts.metrics(), "dynamo_frontend_model_migration_total")
        rows.append(
            {"disturbance": disturbance.title, "moved": int(migrations), **_row(replies, reference_texts, moment)}
        )
        console.print(json.dumps(rows[-1]), markup=False, highlight=False, soft_wrap=True)
        if disturbance.hosts_after is not None:
            hosts.wait_for(disturbance.hosts_after)
        disturbance.mend()
        if disturbance.hosts_mended is not None:
            hosts.wait_for(disturbance.hosts_mended)
    asyncio.run(_ask_all(prompts, tokens, lambda: None))
    request_counts = {name: int(hosts.metrics(name).get("graphopt_worker_requests_total", 0)) for name in "abc"}
    console.print(f"requests of each host, once the third one is there: {request_counts}", highlight=False)
    hosts.close()
    heads = ("same text", "another greedy", "another drawn", "errors", "moves", "last error after, s", "silence, s")
    table = Table("while", *heads)
    for row in rows:
        figures = [str(row[name]) for name in ("same", "other_greedy", "other_drawn", "errors", "moved")]
        table.add_row(row["disturbance"], *figures, f"{row['last_error']:.1f}", f"{row['silence']:.1f}")
    console.print(table)
    _conclude(console, load, json_file, rows)


def _row(replies: list[Stream], reference_texts: list[str], moment: float) -> dict[str, Any]:
    failures = [stream for stream in replies if stream.error]
    differences = [
        number for number, stream in enumerate(replies) if not stream.error and stream.text != reference_texts[number]
    ]
    return {
        "same": len(replies) - len(differences) - len(failures),
        "other_greedy": sum(number % 2 == 0 for number in differences),
        "other_drawn": sum(number % 2 for number in differences),
        "errors": len(failures),
        "last_error": max((stream.arrivals[-1] - moment for stream in failures), default=0.0),
        "silence": max(stream.silence for stream in replies),
        "seconds": max(stream.arrivals[-1] for stream in replies) - min(stream.arrivals[0] for stream in replies),
        "messages": sorted({stream.error for stream in failures}),
    }


@app.command()
def prefixes(
    folder: Annotated[Path, typer.Argument(metavar="SERVED")],
    count: Annotated[int, typer.Option(help="prefixes")] = 8,
    requests: Annotated[int, typer.Option(help="with each prefix")] = 12,
    length: Annotated[int, typer.Option(help="tokens of a prefix")] = 512,
    suffix_tokens: Annotated[int, typer.Option("--own", help="tokens of each request after its prefix")] = 24,
    concurrent: Annotated[int, typer.Option(help="requests at once")] = 4,
    json_file: JsonFile = None,
) -> None:
    """Count prompt tokens that are computed, where requests are routed by prefix, in turn, and at random."""
    console, load = Console(width=120), OtherLoad()
    suffixes = _prompts(folder, count * requests, suffix_tokens)
    common = _prompts(folder, count, length + 1)
    prompts = [common[i % count] + suffix for i, suffix in enumerate(suffixes)]
    random.Random(1).shuffle(prompts)
    rows: list[dict[str, Any]] = []
    with _hosts(folder) as hosts:
        for routing in ("prefix", "turns", "random"):
            hosts.start_front(routing)
            for name in "ab":
                hosts.add(name)
            hosts.wait_for("ab")
            replies = asyncio.run(_some_at_once(prompts, concurrent))
            if errors := [stream.error for stream in replies if stream.error]:
                raise UnavailableError(errors[0])
            prompt_tokens = sum(stream.prompt_tokens for stream in replies)
            computed_tokens = prompt_tokens - sum(stream.cached_tokens for stream in replies)
            workers = [hosts.metrics(name) for name in "ab"]
            worker_tokens = sum(metrics.get("graphopt_worker_prompt_tokens_total", 0.0) for metrics in workers)
            worker_tokens -= sum(metrics.get("graphopt_worker_cached_prompt_tokens_total", 0.0) for metrics in workers)
            rows.append(
                {
                    "routing": routing,
                    "prompt_tokens": prompt_tokens,
                    "computed": computed_tokens,
                    "by_workers": int(worker_tokens),
                }
            )
            console.print(json.dumps(rows[-1]), markup=False, highlight=False)
            hosts.stop("front", "a", "b")
    prefix_tokens = rows[0]["computed"]
    for row in rows[1:]:
        console.print(
            f"{row['routing']}: {row['computed'] / prefix_tokens:.2f} times the tokens of prefix", highlight=False
        )
    _conclude(console, load, json_file, rows)


async def _some_at_once(prompts: list[list[int]], concurrent: int) -> list[Stream]:
    queue, replies = list(reversed(prompts)), []

    async def client() -> None:
        while queue:
            replies.append(await _ask(queue.pop(), 8))

    await asyncio.gather(*(client() for _ in range(concurrent)))
    return replies


def _difference(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def _conclude(console: Console, load: OtherLoad, json_file: Path | None, rows: list[dict[str, Any]]) -> None:
    share = load.share()
    console.print(f"{describe()}; {quiet(share)}", highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": describe(), "others": share, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    app()
