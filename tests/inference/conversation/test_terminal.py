"""A chat through a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphopt.cli import main
from graphopt.inference.conversation.conversation import chat
from graphopt.inference.decoding.sampling import Sampling
from graphopt.inference.session import Session

ROOT = Path(__file__).parents[2]
GRAPHOPT = (sys.executable, "-c", "from graphopt.cli import main; main()")
# Signals of standard input's terminal go to the program. It asks for that itself: what ran between fork and exec, in a
# process with threads, could wait forever for a lock that another thread held. What a shell starts in the background
# ignores SIGINT, and so does all that this starts.
IN_TERMINAL = """
import fcntl, signal, termios
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from graphopt.cli import main
main()
"""


class Terminal:
    """A program in a terminal of its own: Ctrl-C is a character that the terminal turns into a signal."""

    def __init__(self, *arguments: object) -> None:
        self.master, slave = pty.openpty()
        command = [sys.executable, "-c", IN_TERMINAL, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "200"}
        streams = {"stdin": slave, "stdout": slave, "stderr": slave}
        self.process = subprocess.Popen(command, **streams, env=environment, start_new_session=True)
        os.close(slave)
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, pattern: str, seconds: float = 30) -> str:
        """What is printed up to and with a pattern."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.text)):
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.text!r}"
            try:
                self.text += os.read(self.master, 65536).decode(errors="replace").replace("\r\n", "\n")
            except OSError:  # the program has ended
                assert re.search(pattern, self.text), f"no {pattern!r} in {self.text!r}"
        output, self.text = self.text[: match.end()], self.text[match.end() :]
        return output

    def interrupt(self, pattern: str) -> None:
        """Press Ctrl-C at a prompt until a pattern is printed: Python may see a signal only with the next one.

        That is one which comes when readline has shown the last character, and does not wait for input yet.
        """
        for _ in range(5):
            self.write("\x03")
            with contextlib.suppress(AssertionError):
                self.until(pattern, 2)
                return
        self.until(pattern)

    def close(self) -> int:
        code = self.process.wait(20)
        os.close(self.master)
        return code


@pytest.fixture
def terminal(chat_folder: Path) -> Iterator[Terminal]:
    chat_terminal = Terminal("run", chat_folder, "--chat", "--max-new-tokens", 500, "--stop", "\n\n\n", "--threads", 1)
    yield chat_terminal
    if chat_terminal.process.poll() is None:
        os.killpg(chat_terminal.process.pid, signal.SIGKILL)


def counts(text: str) -> tuple[int, int, int]:
    """What /tokens says: tokens in all, tokens of the prompt that were fed, tokens that were made."""
    match = re.search(r"(\d+) tokens in .* fed (\d+) and made (\d+) in", text)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3])


def test_a_chat_in_a_terminal(terminal: Terminal) -> None:
    assert "model: /help lists commands, Ctrl-D ends" in terminal.until(">>> $")

    # Ctrl-C ends a reply, and not the chat
    terminal.write("class Stack, with all that it needs, push and pop\n")
    terminal.until(r"pop\n[^\n]*\n")  # the echo, and the beginning of a reply
    terminal.write("\x03")
    terminal.until(r"\(interrupted\)\n>>> $")
    terminal.write("/tokens\n")
    total, fed_count, made_count = counts(terminal.until(r"tokens/s\n>>> $"))
    assert total == fed_count + made_count
    assert 0 < made_count < 500  # --max-new-tokens: the reply was cut off before

    # the cache is not fed again: of the second turn only what is new
    terminal.write("its top, \\\n")
    terminal.until(r"\.\.\. $")
    terminal.write("and its size\n")
    terminal.until(r"size\n[^\n]*\n")
    terminal.write("\x03")
    terminal.until(r"\(interrupted\)\n>>> $")
    terminal.write("/tokens\n")
    total_then, fed_then, made_then = counts(terminal.until(r"tokens/s\n>>> $"))
    assert fed_then < fed_count
    assert total_then == total + fed_then + made_then

    # at the prompt, Ctrl-C clears what was typed
    terminal.write("half a line")
    terminal.until("half a line$")
    terminal.interrupt(r">>> $")
    terminal.write("half a message \\\n")
    terminal.until(r"\.\.\. $")
    terminal.interrupt(r">>> $")

    # a message too long is refused, and the chat goes on
    terminal.write("word " * 600 + "\n")
    terminal.until(r"error:.* positions.*; /reset begins a new conversation\n>>> $")
    terminal.write("/reset\n/tokens\n")
    terminal.until(r"a new conversation\)\n(.*\n)*0 tokens in the conversation\n>>> $")
    terminal.write("/nothing\n")
    terminal.until(r"there is no command /nothing.*\n>>> $")
    terminal.write("/help\n")
    terminal.until(r"/exit(.*\n){2}>>> $")
    terminal.write("\x04")
    assert terminal.close() == 0


def test_two_turns_in_tmux(chat_folder: Path, session: Session, tmp_path: Path) -> None:
    program = shutil.which("tmux") or pytest.skip("there is no tmux")

    def tmux(*arguments: str) -> str:
        command = [program, "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen_lines(prompts: int) -> list[str]:
        """What is on the screen once there are so many prompts, without the command's own lines."""
        for _ in range(300):
            lines = tmux("capture-pane", "-p", "-t", "chat").rstrip().split("\n")
            if sum(line.startswith(">>>") for line in lines) == prompts and lines[-1] == ">>>":
                return [line.rstrip() for line in lines]
            time.sleep(0.1)
        raise AssertionError(lines)

    options = ["--chat", "--max-new-tokens", "8", "--stop", "\n", "--threads", "1"]
    command = ["env", f"PYTHONPATH={ROOT}", *GRAPHOPT, "run", str(chat_folder), *options]
    tmux("new-session", "-d", "-s", "chat", "-x", "200", "-y", "50", shlex.join(command))
    try:
        screen_lines(1)
        messages: list[dict[str, str]] = []
        for turn, message in enumerate(("import os", "os"), 2):
            tmux("send-keys", "-t", "chat", "-l", message)
            tmux("send-keys", "-t", "chat", "Enter")
            messages.append({"role": "user", "content": message})
            reply = chat(session, messages, max_new_tokens=8, stop=["\n"]).text
            messages.append({"role": "assistant", "content": reply})
            lines = screen_lines(turn)
            # the second reply is to both messages
            assert lines[lines.index(f">>> {message}") + 1] == reply.rstrip()
        assert reply != chat(session, messages[2:3], max_new_tokens=8, stop=["\n"]).text
        tmux("send-keys", "-t", "chat", "/tokens", "Enter")
        total, fed_count, made_count = counts("\n".join(screen_lines(4)))
        assert fed_count + made_count < total  # the cache was not fed again
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            tmux("kill-server")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chat_folder: Path):
    """Return a function that runs the command on the shipped model, with lines of a pipe as its input."""

    def call(*arguments: object, lines: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["graphopt", "run", str(chat_folder), *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        streams = capsys.readouterr()
        return code, streams.out, streams.err

    return call


def test_lines_of_a_pipe_are_turns(run) -> None:
    options = ("--chat", "--max-new-tokens", 6, "--json", "--logprobs", 1, "--system", "Lists.")
    code, out, _ = run(*options, lines="a stack\n\nits top\n/exit\nnever")
    assert code == 0
    turns = json.loads(out)
    assert [turn["message"] for turn in turns] == ["a stack", "its top"]
    assert turns[1]["fed"] < len(turns[1]["reply"]["prompt"])
    assert len(turns[1]["reply"]["logprobs"]) == 6
    # the same as turns of the command line
    assert json.loads(run(*options, "--prompt", "a stack", "--prompt", "its top")[1]) == turns
    _, stdout, stderr = run(*options[:3], *options[6:], lines="a stack\nits top\n")
    assert stdout == "".join(turn["reply"]["text"] + "\n" for turn in turns)
    assert stderr.count("stopped after 6 tokens") == 2


def test_a_chat_draws_as_the_maker_recommends(
    run, chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ("--prompt", "a stack", "--max-new-tokens", 12)
    greedy = run("--chat", *prompt)[1]
    config = {"do_sample": True, "temperature": 1.5, "top_k": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    of_folder = Sampling.of_folder
    monkeypatch.setattr(Sampling, "of_folder", lambda folder, seed: of_folder(tmp_path, seed))
    sampled_text = run("--chat", *prompt)[1]
    assert sampled_text not in ("", greedy)
    monkeypatch.setattr(Sampling, "of_folder", of_folder)
    assert run("--chat", *prompt, "--temperature", 1.5, "--top-k", 40)[1] == sampled_text
    assert run("--chat", *prompt, "--temperature", 0)[1] == greedy


def test_what_the_command_refuses(run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("[")
    schema = ("--json-schema", tmp_path / "schema.json")
    for arguments, message in (
        ((), "give --prompt TEXT, or --chat"),
        (("--prompt", "a", "--system", "b"), "add --chat"),
        (("--prompt", "a", "--logprobs", 1), "add --json"),
        (("--prompt", "a", *schema, "--regex", "a"), "give either --json-schema or --regex"),
        (("--prompt", "a", *schema), "not JSON"),
        (("--chat", "--prompt", "word " * 600), "1024 positions"),
    ):
        code, _, error = run(*arguments)
        assert code == 2
        assert message in " ".join(error.split())


def test_a_completion_has_stop_strings_and_a_form_too(run, tmp_path: Path) -> None:
    code, out, _ = run("--prompt", "class Stack:\n    def", "--stop", "(")
    assert code == 0
    assert out.startswith("class Stack:\n    def")
    assert "(" not in out
    (tmp_path / "schema.json").write_text('{"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}')
    schema = tmp_path / "schema.json"
    assert json.loads(run("--prompt", "x = ", "--json-schema", schema, "--json")[1])[0]["text"].startswith('{"a": "b"')
    assert re.fullmatch(r"x = \d\d\n", run("--prompt", "x = ", "--regex", r"\d\d")[1])
