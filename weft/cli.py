"""The shell: verb -> function, and what a failure looks like. No logic of its own.

A verb imports what it needs inside, so that ``weft --help`` and usage errors import no torch.

Errors are one line ``weft: error: …`` on stderr. Exit codes: 0 done, 2 usage or data (ValueError,
OSError), 1 any other failure, 130 Ctrl-C, 143 SIGTERM. ``--debug`` shows the traceback above the line.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from json import dumps
from pathlib import Path
from shutil import get_terminal_size
from typing import Annotated, Literal

import typer

from weft import __version__

USAGE, FAILURE, INTERRUPTED = 2, 1, 130

Precision = Literal["auto", "fp32", "bf16"]
_MODEL = typer.Argument(help="A model folder, or the name of a model that comes with weft.", show_default=False)
_BEAM = typer.Option(min=1, help="Hypotheses a sentence; 1 is greedy. Else as the model's recipe says.")
_EXACT = typer.Option(help="The same to the last bit beside any other lines; takes longer.")
_TOP_K = typer.Option(help="Draw from the k likeliest tokens only.")
_TOP_P = typer.Option(help="Draw from the likeliest with this probability together.")
_MIN_P = typer.Option(help="Draw from those at least so likely, next to the likeliest.")
_PRECISION = typer.Option(help="Of activations and products.")
_JSON = typer.Option("--json", help="Machine-readable results on stdout.")

# Plain help, without rich's boxes: it reads the same in a pipe and starts sooner.
app = typer.Typer(name="weft", rich_markup_mode=None, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weft {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _weft(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Attention models as working software: train, run and look inside them."""
    # `main` has taken --debug out, so that it may follow the verb too; it is declared here for the help.
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The keys of a recipe are options too, --model.dim=128 and its like, but typer does not know them.
_OPEN_ENDED = {"allow_extra_args": True, "ignore_unknown_options": True}
_TASKS = ("translation", "language")


@app.command("train", context_settings=_OPEN_ENDED)
def _train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe's name, a TOML file, or a task ('translation', 'language'), whose sizes the data chooses.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Where the run and its model go; a run that is there goes on.", show_default=False)
    ],
    precision: Annotated[Precision | None, typer.Option(help="The same as --training.precision.")] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="Plain formulas instead of the fast kernels: --training.reference=true.")
    ] = False,
    fork: Annotated[bool, typer.Option("--fork", help="Go on although the recipe has changed.")] = False,
) -> None:
    """Train a model. Every key of a recipe is an option: --data.train=my.tsv --training.steps=2000."""
    from weft.config import Recipe, find_recipe

    overrides = _overrides(context.args)
    overrides += [f"training.precision={precision}"] * (precision is not None)
    overrides += ["training.reference=true"] * reference
    if recipe in _TASKS:
        overrides.append(f"task={recipe}")
    chosen = Recipe.make({}, overrides) if recipe in _TASKS else find_recipe(recipe, overrides, _TASKS)
    if not chosen.data.train:
        given = {"translation": "my.tsv, --data.train=a.en,a.de", "language": "my.txt, --data.train=a folder"}
        raise ValueError(f"no training data: give --data.train={given[chosen.task]} or --data.train=set:part")
    from weft.training import language, progress, translation
    from weft.training.checkpoint import RunFolder

    RunFolder(out).check_room()
    task = {"translation": translation, "language": language}[chosen.task]
    with progress.reporter(out, chosen.training.tensorboard) as report:
        if recipe in _TASKS:
            chosen = task.choose(overrides, report)
        task.train(chosen, out, report, fork)


@app.command("translate")
def _translate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|TEXT",
            help="A model folder, or the name of a model that comes with weft (if none, tatoeba); then what to "
            "translate (if nothing, stdin line by line).",
            show_default=False,
        ),
    ] = None,
    to: Annotated[str | None, typer.Option(help="The language, of a model that has several.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The language of the text; left out, the text tells.")
    ] = None,
    split: Annotated[bool | None, typer.Option(help="Sentence by sentence. Else as the recipe says.")] = None,
    recase: Annotated[bool | None, typer.Option(help="Capitals as small letters. Else as the recipe says.")] = None,
    carry: Annotated[bool | None, typer.Option(help="Copy addresses and numbers. Else as the recipe says.")] = None,
    beam: Annotated[int | None, _BEAM] = None,
    n_best: Annotated[int, typer.Option(min=1, help="So many translations of each, best first, a line each.")] = 1,
    length_penalty: Annotated[float | None, typer.Option(help="The more, the longer.")] = None,
    no_repeat: Annotated[int | None, typer.Option(min=0, help="No so many tokens in a row come twice.")] = None,
    replace_unknown: Annotated[
        bool | None, typer.Option(help="Put the source word it attended to in place of an unknown one.")
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Draw at random instead of searching for the best.")] = False,
    temperature: Annotated[float | None, typer.Option(help="Of the draw: below 1 is more cautious.")] = None,
    top_k: Annotated[int | None, _TOP_K] = None,
    top_p: Annotated[float | None, _TOP_P] = None,
    min_p: Annotated[float | None, _MIN_P] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw.")] = None,
    exact: Annotated[bool | None, _EXACT] = None,
    precision: Annotated[Precision, _PRECISION] = "auto",
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Translate the given text, or stdin to stdout line by line, in order."""
    from weft import api

    model, text = _model_first(words or [], "tatoeba")
    translator = api.load_translator(model, precision)
    found = translator.translate_lines(
        text or _stdin(),
        window=1 if text or sys.stdin.isatty() else api.WINDOW,
        skipped=lambda line: print(f"weft: warning: {line}; left empty", file=sys.stderr),
        to=to,
        from_=source,
        split=split,
        recase=recase,
        carry=carry,
        beam=beam,
        n_best=n_best,
        length_penalty=length_penalty,
        no_repeat=no_repeat,
        replace_unknown=replace_unknown,
        sample=sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        exact=exact,
    )
    for translation in found:
        texts = [_line(best.text) for best in translation.n_best]
        texts += [""] * (n_best - len(texts))  # a line of input gives as many lines as every other
        typer.echo(translation.json() if json else "\n".join(texts))


@app.command("generate")
def _generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL|PROMPT",
            help="A model folder, a folder of transformers, a llama2.c file, or the name of a model that comes with "
            "weft (if none, shakespeare); then what to go on from (if nothing, each line of stdin).",
            show_default=False,
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="So many continuations of each, most probable first.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=0, help="So many tokens at most.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to end before; may be given several times.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Below 1 is more cautious; 0 takes the likeliest.")] = None,
    top_k: Annotated[int | None, _TOP_K] = None,
    top_p: Annotated[float | None, _TOP_P] = None,
    min_p: Annotated[float | None, _MIN_P] = None,
    typical_p: Annotated[float | None, typer.Option(help="Only the most typical with this probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: less of what stood already.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Above 0: less of what came often.")] = None,
    no_repeat: Annotated[int | None, typer.Option(min=0, help="No so many tokens in a row come twice.")] = None,
    beam: Annotated[int | None, typer.Option(min=1, help="Search with a beam instead of drawing.")] = None,
    sample: Annotated[bool | None, typer.Option(help="Draw, or take the best. Else as the recipe says.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw.")] = None,
    exact: Annotated[bool | None, _EXACT] = None,
    walk: Annotated[bool, typer.Option("--walk", help="Show every step from the prompt to the next token.")] = False,
    precision: Annotated[Precision, _PRECISION] = "auto",
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Go on from the prompts. One alone is shown token by token as it comes, several on a line each."""
    from weft import api

    given: api.GenerateOptions = {
        "n": None if n == 1 else n,
        "max_tokens": max_tokens,
        "stop": stop or None,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "no_repeat": no_repeat,
        "beam": beam,
        "sample": sample,
        "seed": seed,
        "exact": exact,
    }
    model, prompt = _model_first(words or [], "shakespeare")
    language_model = api.load_language_model(model, precision)
    if walk:
        if json:
            raise ValueError("--json: a walk is told in words only")
        from weft.views.walk import show

        for text in prompt or _stdin():
            show(language_model.walk(text, **given))
        return
    if prompt and len(prompt) == 1 and n == 1 and not json and (beam or 1) == 1:
        pieces = language_model.stream(prompt[0], **given)
        typer.echo(prompt[0] + next(pieces, ""), nl=False)  # what is wrong is told before anything is shown
        for piece in pieces:
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo()
        return
    for found in language_model.generate_lines(prompt or _stdin(), **given):
        if json:
            typer.echo(found.json())
        for best in () if json else found.n_best:
            whole = _line(found.prompt + best.text)
            typer.echo(f"{best.log_prob:.2f}\t{whole}" if n > 1 else whole)


@app.command("look")
def _look(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|TEXT|RECORD",
            help="A model (if none, tatoeba) and what to translate, or to go on from; or a saved record alone.",
            show_default=False,
        ),
    ],
    target: Annotated[str | None, typer.Option(help="A translation to look at instead of the model's own.")] = None,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("look.html"),
    figure: Annotated[Path | None, typer.Option(help="The alignment as a picture too (.svg, .png, .pdf).")] = None,
    record: Annotated[Path | None, typer.Option(help="Everything that was seen, as one file.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Between words instead of pieces, but for the page.")] = False,
    show: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    beam: Annotated[int | None, _BEAM] = None,
    to: Annotated[str | None, typer.Option(help="The language, of a translator that has several.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a language model: so many at most.")] = None,
    sample: Annotated[bool | None, typer.Option(help="Draw, or take the best. Else as the recipe says.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the draw: below 1 is more cautious.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draw.")] = None,
    precision: Annotated[Precision, _PRECISION] = "auto",
) -> None:
    """See what the model attends to: in the terminal, and all of it as one page that needs no network."""
    from weft import api
    from weft.views import figures, terminal

    if figure is not None:
        figures.check_ending(figure)  # before the work, not after it
    alone = to is None and len(given) == 1 and len(given[0].split()) == 1  # a record: a text needs a language
    model, texts = (given[0], []) if alone else _model_first(given, "tatoeba")
    if len(texts) > 1:
        raise ValueError(f"one text is looked at, not {len(texts)}: put it into quotes")
    drawn = {"sample": sample, "temperature": temperature, "seed": seed}
    found = api.look(
        model, texts[0] if texts else None, target, precision, to=to, beam=beam, max_tokens=max_tokens, **drawn
    )
    if figure is not None:
        found.figure(figure, words)
    if record is not None:
        found.record.save(record)
    found.write(out)
    columns = get_terminal_size().columns if sys.stdout.isatty() else None
    typer.echo(found.draw(terminal.shows_colours(sys.stdout), words, columns))
    typer.echo(f"{', '.join(str(path) for path in (out, figure, record) if path is not None)} written")
    if show:
        typer.launch(str(out))


@app.command("convert")
def _convert(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A model that weft reads.")],
    target: Annotated[
        Path, typer.Argument(metavar="TO", help="A new folder; of a language model a .bin of llama2.c too.")
    ],
    to: Annotated[
        Literal["weft", "transformers", "ctranslate2"] | None,
        typer.Option(help="For whom; a translator for any. weft if --weights is given, else transformers."),
    ] = None,
    weights: Annotated[
        Literal["fp32", "bf16", "int8"] | None, typer.Option(help="Of weft's own: how matrices are stored.")
    ] = None,
    quantization: Annotated[
        Literal["none", "int8", "int16", "float16", "bfloat16"], typer.Option(help="Of what CTranslate2 is given.")
    ] = "none",
) -> None:
    """Write a model in the format of others, or with --weights in weft's own, smaller.

    A translator is checked when it goes to others: it must say there what it says here.
    """
    from weft import api

    chosen = to or ("weft" if weights else "transformers")
    typer.echo(api.convert(source, target, chosen, quantization, weights or "fp32"))


@app.command("evaluate")
def _evaluate(
    model: Annotated[str, _MODEL],
    data: Annotated[
        list[str] | None,
        typer.Argument(
            help="Pairs (a TSV file, two files), text files, or a named set's part; a language model's own validation "
            "text if nothing.",
            show_default=False,
        ),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Another model, to compare with by paired bootstrap.")] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="The language, of a model of several; left out, every direction.")
    ] = None,
    to: Annotated[str | None, typer.Option(help="The language to translate to, of a model of several.")] = None,
    beam: Annotated[int | None, _BEAM] = None,
    tokenize: Annotated[
        str | None, typer.Option(help="sacreBLEU's tokenizer, 13a if nothing is said; none for tokenised text.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A file for the translations, a line each.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="Of a language model: tokens of a window.")] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Of a language model: from window to window.")] = None,
    nanogpt: Annotated[bool, typer.Option("--nanogpt", help="Of a language model: estimate as nanoGPT does.")] = False,
    align: Annotated[
        bool, typer.Option("--align", help="Of a translator: how often its attention hits the right word.")
    ] = False,
    exact: Annotated[bool | None, _EXACT] = None,
    precision: Annotated[Precision, _PRECISION] = "auto",
    json: Annotated[bool, _JSON] = False,
) -> None:
    """Measure a model: a translator's BLEU and chrF on a test set, or a language model's perplexity on a text."""
    from weft import api
    from weft.evaluation import alignment, language, translation

    given = data[0] if data and len(data) == 1 else data
    task = api.task_of(model)
    others: dict[str, object] = {"length": length, "stride": stride, "nanogpt": nanogpt or None}
    if task == "language":
        others = {"baseline": baseline, "beam": beam, "tokenize": tokenize, "output": output, "exact": exact}
        others |= {"align": align or None, "from": source, "to": to}
    if wrong := [f"--{name}" for name, value in others.items() if value is not None]:
        raise ValueError(f"{', '.join(wrong)}: not for the task {task!r}, which {model} is for")
    if task == "language":
        report: language.Report | translation.Report | translation.Reports | alignment.Report = (
            language.evaluate_folder(model, given, length=length, stride=stride, nanogpt=nanogpt, precision=precision)
        )
    elif not given:
        raise ValueError("nothing to translate: give a TSV file, two files, or a part of a named set")
    elif align:
        given_too = {"baseline": baseline, "beam": beam, "tokenize": tokenize, "output": output, "exact": exact}
        given_too |= {"from": source, "to": to}
        if wrong := [f"--{name}" for name, value in given_too.items() if value is not None]:
            raise ValueError(f"{', '.join(wrong)}: --align reads given translations and searches for none")
        report = alignment.evaluate_folder(model, given, precision)
    else:
        report = translation.evaluate_folder(
            model,
            given,
            baseline,
            source=source,
            tokenize=tokenize or "13a",
            samples=1000,
            output=output,
            precision=precision,
            to=to,
            beam=beam,
            exact=exact,
        )
    typer.echo(report.json() if json else report.text())


@app.command("models")
def _models(json: Annotated[bool, _JSON] = False) -> None:
    """List the models that come with weft."""
    from weft import folder

    found = [folder.describe(folder.SHIPPED / name) for name in folder.names()]
    if json:
        typer.echo(dumps(found, ensure_ascii=False, indent=2))
        return
    for facts in found:
        typer.echo(f"{facts['name']}: {facts['does']}; {facts['megabytes']:.1f} MB, {facts['path']}")
    if not found:
        typer.echo("none yet")


_data = typer.Typer(help="Named data sets: what there is, under which licence, and getting it.", rich_markup_mode=None)
app.add_typer(_data, name="data")


@_data.command("list")
def _data_list(json: Annotated[bool, _JSON] = False) -> None:
    """List the named sets, their licences, and where they are."""
    from weft.data import corpora

    sets = [corpora.describe(name) for name in corpora.SETS]
    if json:
        typer.echo(dumps(sets, ensure_ascii=False, indent=2))
        return
    for facts in sets:
        typer.echo(f"{facts.pop('name')}: {facts.pop('title')}")
        for name, fact in facts.items():
            typer.echo(f"    {name:<10}{fact}")


@_data.command("get")
def _data_get(name: Annotated[str, typer.Argument(help="A set of `weft data list`.", show_default=False)]) -> None:
    """Get a named set, verified. What is there already is not fetched again."""
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from weft.data import corpora

    corpora.named(name)  # a wrong name is told before a bar is drawn
    with Progress(DownloadColumn(), TransferSpeedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name)
        typer.echo(corpora.get(name, lambda here, all_: bar.update(task, completed=here, total=all_)))


def _overrides(words: Sequence[str]) -> list[str]:
    """``--a.b=v`` and ``--a.b v`` as ``a.b=v``."""
    found: list[str] = []
    for word in words:
        if word.startswith("--"):
            found.append(word.removeprefix("--"))
        elif found and "=" not in found[-1]:
            found[-1] += f"={word}"
        else:
            raise ValueError(f"expected a key of the recipe such as --training.steps=2000, not {word!r}")
    return found


def _model_first(words: Sequence[str], default: str) -> tuple[str, list[str]]:
    """The model and the texts that are given, where the model may be left out.

    The first word names the model if it is a path or a name that is there, or looks like one: there is no space in it,
    and a text follows it, or it has a slash or is next to a name.
    """
    from difflib import get_close_matches

    from weft import folder

    meant = str(folder.SHIPPED / default) if default in folder.names() else default  # whatever the folder at hand holds
    first, *rest = words or [meant]
    is_there = first in folder.names() or os.path.exists(first)
    mistyped = get_close_matches(first, folder.names(), cutoff=0.85)
    is_like = len(first.split()) == 1 and (rest or os.sep in first or mistyped)
    if not (is_there or not words or is_like):
        return meant, [first, *rest]
    if not (is_there or mistyped or os.sep in first) and len(rest) > 1:
        raise ValueError(f"no model {first!r} is here, and a text of several words goes into quotes")
    return first, rest


def _stdin() -> Iterator[str]:
    from weft.data.text import lines_of

    return lines_of(sys.stdin.buffer, "stdin")


def _line(text: str) -> str:
    """Text on one line: a translation must not add lines to a stream."""
    return text.replace("\n", " ")


@app.command("machine")
def _machine() -> None:
    """Tell what this machine can do, in one line."""
    from weft.kernels import machine, native

    why = native.why_not()
    typer.echo(f"{machine.describe()}, searches {f'in torch ({why})' if why else 'compiled'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``weft``; those of the process if None.

    Returns:
        The exit code.
    """
    words, debug = _take_debug(sys.argv[1:] if arguments is None else arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(words, debug)


def _run(words: list[str], debug: bool) -> int:
    try:
        code = typer.main.get_command(app).main(words, prog_name="weft", standalone_mode=False)
    except (typer.TyperException, ValueError, OSError) as error:
        return _fail(_message(error), USAGE, debug)
    except SystemExit as stop:  # a run that SIGTERM ended after saving
        return stop.code if isinstance(stop.code, int) else FAILURE
    except typer.Abort:
        return _fail("interrupted", INTERRUPTED, debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", FAILURE, debug)
    if code == INTERRUPTED:  # typer's answer to Ctrl-C
        return _fail("interrupted", INTERRUPTED, debug=False)
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"weft: warning: {message}", file=sys.stderr)


def _take_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """The words without ``--debug``, which may stand anywhere before a ``--``, and whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    options = [word for word in words[:end] if word != "--debug"]
    return [*options, *words[end:]], len(options) < end


def _message(error: Exception) -> str:
    if isinstance(error, typer.TyperException):
        text = error.format_message().rstrip(".")
        text = text[:1].lower() + text[1:]
        if "Did you mean" in text or "Possible options" in text:
            return text
        verb = getattr(getattr(error, "ctx", None), "command_path", "weft")
        return f"{text}; see '{verb} --help'"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _fail(message: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    line = " ".join(part.strip() for part in message.splitlines())
    print(f"weft: error: {line}", file=sys.stderr)
    return code
