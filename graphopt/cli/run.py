"""The command ``run``: complete texts, chat, or embed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphopt.cli.commands import command
from graphopt.cli.console import Inputs, Json, OnDevice, Threads, err, out, print_json, progress, read_text, show_notes
from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.inference.decoding.continuation import Settings
    from graphopt.inference.decoding.grammar import Grammar
    from graphopt.inference.decoding.sampling import Sampling
    from graphopt.inference.decoding.speculation import Speculation
    from graphopt.inference.prompt_cache import PromptCache
    from graphopt.inference.session import Session
    from graphopt.inference.states.eviction import Eviction
    from graphopt.tasks import Task
    from graphopt.util.targets import Device

_GENERATION = (
    "--max-new-tokens, --temperature, --top-k, --top-p, --seed, --stop, --json-schema, --regex, --logprobs, "
    "--speculate, --cache"
)


def _list_drafts(name: str | None) -> str | None:
    if name == "help":
        from graphopt.inference.decoding.proposers.registry import list_proposers

        for form, summary in list_proposers().items():
            out.print(f"{form}: {summary}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit
    return name


@command("run")
def run(
    folder: Annotated[Path, typer.Argument(help="an artifact")],
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="a text to complete, or to embed; several make a batch, or turns of a chat"),
    ] = None,
    audio: Annotated[
        list[Path] | None, typer.Option("--audio", help="a WAV file, of a model that reads recordings")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", help="a file of an image, of a model that reads images; a prompt may have several"),
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", help="of --audio, such as en; by default the model finds out")
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option("--prompt-name", help="of an encoder: what texts are embedded for, such as query"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="talk with a model that was trained to chat")] = False,
    system: Annotated[
        str | None,
        typer.Option("--system", help="what the model is told before a chat; by default what its maker says"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="tokens to make at most; by default 64, or 1024 for a reply of a chat")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy, the default; in a chat it is what the model's generation_config.json says"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="draw among the k most likely tokens")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="draw among the most likely tokens that reach this probability")
    ] = None,
    seed: int = 0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="end a text before this string")] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="a file: write JSON that this schema describes")
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="write a text that this regular expression matches as a whole")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="list log probabilities of chosen tokens and of this many others; with --json"),
    ] = None,
    speculate: Annotated[
        str | None,
        typer.Option(
            "--speculate",
            callback=_list_drafts,
            help="draft, and check several tokens a step; the text stays the same: auto, lookup, the folder of a "
            "smaller model, heads, self:..., verified:A,B; `--speculate help` lists all",
        ),
    ] = None,
    draft_tokens: Annotated[
        str, typer.Option("--draft-tokens", help="guesses in a step, up to 11; auto: by what they cost and gain, 0 too")
    ] = "auto",
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="a file of `graphopt cache make`: prompts come behind its text"),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help="tokens of a prompt, and of what comes behind it, that the cache keeps: others are evicted"
        ),
    ] = None,
    inputs: Inputs = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", help="of a model that reads no text: an .npz file for its outputs; of a denoiser also an image"
        ),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="tell what drafts did")] = False,
    threads: Threads = 0,
    device: OnDevice = "cpu",
    as_json: Json = False,
) -> None:
    """Complete one or more prompts, or chat, streaming as the model goes; of an encoder, print cosines of embeddings.

    An encoder-decoder reads each prompt, or each recording, and its text is printed. Of a model of images or recordings
    its classes, boxes, shares of pixels, text or cosines are. A vision-language model answers each prompt about all
    images.

    Of a denoiser the sample is printed that a scheduler's loop makes of noise from --seed; --save writes it.

    Of a graph that reads no text, its outputs for --inputs, or for random inputs, are printed, and written by --save.

    Of a classifier the classes of each prompt are printed, of a reranker the documents (all prompts but the first) by
    their score for the query (the first).

    In a chat Ctrl-C ends a reply, Ctrl-D the chat, and /help lists what else there is. Where standard input is no
    terminal, each line of it is a turn. The options of generating are refused with an encoder.
    """
    from graphopt.inference.conversation.terminal import converse
    from graphopt.inference.decoding.continuation import Settings
    from graphopt.inference.decoding.proposers.registry import open_speculation
    from graphopt.inference.session import open_folder, session_from
    from graphopt.inference.states.eviction import Eviction
    from graphopt.tasks import TASKS

    model = open_folder(folder, threads=threads, device=device)
    task = TASKS[model.manifest.task].with_inputs(inputs)
    _check_options(chat, prompt or audio or not task.reads_text, system, logprobs, as_json)
    show_notes(model.notes)
    files = _files(task, folder, {"texts": prompt, "images": image, "recordings": audio})
    if inputs is not None and files:
        raise InputError(f"{task.noun} is fed files or arrays", file=folder, remedy="leave out --inputs, or the files")
    if (language and "recordings" not in task.takes) or (save and task.reads_text):
        reason = "is told no language" if language else "has no outputs to save"
        raise InputError(f"{task.noun} {reason}", file=folder, remedy="leave out --language and --save")
    if not task.generates:
        decoding = (max_new_tokens, temperature, top_k, top_p, logprobs, speculate, cache, keep)
        options = (*decoding, stop or None, json_schema, regex)
        if chat or (seed and not task.takes_seed) or any(option is not None for option in options):
            remedy = f"leave out the options of generating: {_GENERATION}"
            raise InputError(f"{task.noun} generates nothing", file=folder, remedy=remedy)
        if task.takes_seed and inputs is None:
            return _print_sample(task, model, seed, save, as_json)
        if not task.reads_text and (inputs is not None or task.reads == "arrays"):
            return _print_outputs(task, model, save, as_json)
        if save is not None:
            from graphopt.cli.signals import print_signals

            return print_signals(model, files, as_json, save)
        return task.print_run(model.with_prompt(prompt_name), files, as_json)
    sampling = _sampling(folder if chat else None, temperature, top_k, top_p, seed)
    grammar = _grammar(json_schema, regex)
    settings = Settings(max_new_tokens or (1024 if chat else 64), sampling, tuple(stop or ()), grammar, logprobs)
    if image:
        _refuse_beside_images(chat, speculate, cache, keep)
        return _print_about_images(model, prompt or [], image, settings, threads, device, as_json)
    if "recordings" in task.takes:
        _refuse_beside_sources(chat, speculate, cache, keep)
        from graphopt.cli.seq2seq import print_texts
        from graphopt.inference.seq2seq import seq2seq_of

        encoder_decoder = seq2seq_of(model, threads=threads, device=device)
        return print_texts(encoder_decoder, prompt or [], audio or [], settings, language=language, as_json=as_json)
    if chat and keep is not None:
        raise InputError(
            "a chat goes back to earlier turns, which may be evicted", remedy="leave out --chat, or --keep"
        )
    session = session_from(model, device=device)
    speculation = None if speculate is None else open_speculation(session, speculate, draft_tokens)
    prompt_cache = None if cache is None else _load_cache(session, cache, chat, system)
    if chat:
        completions: Sequence[dict[str, Any]] = converse(
            session,
            system=system,
            messages=prompt or [],
            settings=settings,
            streams=not as_json,
            proposer=speculation,
            cache=prompt_cache,
        )
    else:
        texts = [("" if prompt_cache is None else prompt_cache.prompt.text) + text for text in prompt or []]
        eviction = None if keep is None else Eviction(keep)
        completions = _complete(session, texts, settings, as_json, speculation, prompt_cache, eviction)
    _print_results(completions, speculation, stats, as_json)
    return None


def _print_about_images(
    model: Any,
    prompts: Sequence[str],
    images: Sequence[Path],
    settings: Settings,
    threads: int,
    device: Device,
    as_json: bool,
) -> None:
    """Print the answer of a vision-language model to each prompt about all images."""
    from graphopt.cli.images import print_image_texts
    from graphopt.inference.images import vision_language_of

    with_images = vision_language_of(model, threads=threads, device=device)
    return print_image_texts(with_images, prompts, images, settings, as_json=as_json)


def _print_sample(task: Any, model: Any, seed: int, save: Path | None, as_json: bool) -> None:
    """Print the sample that a denoiser makes of noise."""
    from graphopt.cli.denoisers import print_sample

    return print_sample(model, task.samples, seed, save, as_json)


def _print_outputs(task: Any, model: Any, save: Path | None, as_json: bool) -> None:
    """Print the outputs of a graph that is fed arrays."""
    from graphopt.cli.graphs import print_outputs

    return print_outputs(model, task.samples, save, as_json)


def _files(task: Task, folder: Path, options: Mapping[str, Sequence[object] | None]) -> list[str]:
    """Return what is given of what a model reads.

    Raises:
        InputError: something else is given.
    """
    takes = task.takes or (task.reads,)
    names = {"texts": "--prompt", "images": "--image", "recordings": "--audio", "arrays": "--inputs"}
    wrong = [kind for kind, inputs in options.items() if inputs and kind not in takes]
    if wrong:
        raise InputError(
            f"{task.noun} reads {' or '.join(takes)}, and no {wrong[0]}",
            file=folder,
            remedy=f"give {' or '.join(names[kind] for kind in takes)} in place of {names[wrong[0]]}",
        )
    return [str(value) for value in options.get(task.reads) or ()]


def _load_cache(session: Session, file: Path, chat: bool, system: str | None) -> PromptCache:
    """Read a file of `graphopt cache make`.

    Raises:
        InputError: it cannot be used, or is of another use than this one.
    """
    from graphopt.inference.prompt_cache import PromptCache

    cache = PromptCache.load(session, file)
    if chat == (cache.prompt.system is None):
        use, remedy = ("texts", "leave --chat out") if chat else ("chats", "add --chat")
        raise InputError(f"the cache is for {use}", file=file, remedy=remedy)
    if system is not None:
        raise InputError("the cache holds the system prompt", file=file, remedy="leave --system or --cache out")
    return cache


def _check_options(chat: bool, prompt: object, system: str | None, logprobs: int | None, as_json: bool) -> None:
    """Refuse options that say nothing without another one.

    Raises:
        InputError: names the other option.
    """
    if not chat and not prompt:
        raise InputError("there is no prompt", remedy="give --prompt TEXT, or --chat")
    if system is not None and not chat:
        raise InputError("--system is told before a chat", remedy="add --chat, or leave it out")
    if logprobs is not None and not as_json:
        raise InputError("--logprobs are part of the JSON report", remedy="add --json")


def _refuse_beside_sources(chat: bool, speculate: str | None, cache: Path | None, keep: int | None) -> None:
    """Refuse options that an encoder-decoder has not.

    Raises:
        InputError: one is given.
    """
    if chat or speculate is not None or cache is not None or keep is not None:
        raise InputError(
            "an encoder-decoder makes one text of each source, without a chat, drafts, kept prompts and eviction",
            remedy="leave out --chat, --speculate, --cache and --keep",
        )


def _refuse_beside_images(chat: bool, speculate: str | None, cache: Path | None, keep: int | None) -> None:
    """Refuse options that a prompt with images has not.

    Raises:
        InputError: one is given.
    """
    if chat or speculate is not None or cache is not None or keep is not None:
        raise InputError(
            "a prompt with images is answered once, without a chat, drafts, kept prompts and eviction",
            remedy="leave out --chat, --speculate, --cache and --keep, or --image",
        )


def _sampling(
    folder: Path | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int
) -> Sampling:
    """Return how to draw tokens; what the options leave out is as the ``generation_config.json`` of ``folder`` says."""
    from graphopt.inference.decoding.sampling import Sampling

    defaults = Sampling.of_folder(folder, seed) if folder is not None and temperature != 0 else Sampling(seed=seed)
    return Sampling(
        temperature=defaults.temperature if temperature is None else temperature,
        top_k=defaults.top_k if top_k is None else top_k,
        top_p=defaults.top_p if top_p is None else top_p,
        seed=seed,
    )


def _print_results(
    completions: Sequence[dict[str, Any]], speculation: Speculation | None, stats: bool, as_json: bool
) -> None:
    """Print completions as JSON, with what drafts did if asked for; else only what drafts did, on standard error."""
    if as_json:
        drafts = None if speculation is None or not stats else speculation.stats.report()
        return print_json(completions if drafts is None else {"completions": completions, "drafts": drafts})
    if speculation is not None:
        for line in speculation.stats.lines() if stats else speculation.stats.notes:
            err.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    return None


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    """Return the form that is asked for.

    Raises:
        InputError: there are two, or the schema cannot be read.
    """
    from graphopt.inference.decoding.grammar import Grammar

    if json_schema is not None and regex is not None:
        raise InputError("a text cannot have two forms", remedy="give either --json-schema or --regex")
    if json_schema is not None:
        try:
            return Grammar.json_schema(read_text(json_schema))
        except InputError as error:
            raise InputError(error.message, file=json_schema, remedy=error.remedy) from error
    return None if regex is None else Grammar.regex(regex)


def _complete(
    session: Session,
    prompts: Sequence[str],
    settings: Settings,
    as_json: bool,
    proposer: Speculation | None,
    cache: PromptCache | None,
    eviction: Eviction | None,
) -> list[dict[str, Any]]:
    from graphopt.inference.generation import complete, steps

    if as_json:
        completions = complete(session, prompts, settings, proposer, cache, eviction)
        return [{"prompt_text": t, **c.model_dump()} for t, c in zip(prompts, completions, strict=True)]
    if len(prompts) == 1:
        parts = steps(session, prompts, settings, proposer, cache, eviction)
        sys.stdout.write(prompts[0])
        for step in parts:
            sys.stdout.write(step.texts[0])
            sys.stdout.flush()
        sys.stdout.write("\n")
        return []
    with progress() as say:
        say("generating")
        completions = complete(session, prompts, settings, proposer, cache, eviction)
    for number, (text, completion) in enumerate(zip(prompts, completions, strict=True), start=1):
        out.rule(f"{number} ({completion.stopped})")
        out.print(text + (completion.text or ""), markup=False, highlight=False)
    return []
