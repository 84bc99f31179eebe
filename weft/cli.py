"""The shell: verb -> function, and what a failure looks like. No logic of its own.

A verb imports what it needs inside, so that ``weft --help`` and usage errors import no torch.

Errors are one line ``weft: error: …`` on stderr. Exit codes: 0 done, 2 usage or data (ValueError,
OSError), 1 any other failure, 130 Ctrl-C. ``--debug`` shows the traceback above the line.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from weft import __version__

USAGE, FAILURE, INTERRUPTED = 2, 1, 130

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


@app.command("machine")
def _machine() -> None:
    """Tell what this machine can do, in one line."""
    from weft.kernels import machine

    typer.echo(machine.describe())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after ``weft``; those of the process if None.

    Returns:
        The exit code.
    """
    words, debug = _take_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        code = typer.main.get_command(app).main(words, prog_name="weft", standalone_mode=False)
    except (typer.TyperException, ValueError, OSError) as error:
        return _fail(_message(error), USAGE, debug)
    except typer.Abort:
        return _fail("interrupted", INTERRUPTED, debug)
    except Exception as error:
        hint = "" if debug else " (--debug shows where)"
        return _fail(f"{type(error).__name__}: {error}{hint}", FAILURE, debug)
    if code == INTERRUPTED:  # typer's answer to Ctrl-C
        return _fail("interrupted", INTERRUPTED, debug=False)
    return code if isinstance(code, int) else 0


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
