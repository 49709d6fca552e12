"""Help, output and interruption, which every command of this repository handles in the same way."""

from __future__ import annotations

import ast
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup


class _Polite:
    """The parts of a command or a group that do not depend on which of both it is."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # A terminal that lacks a character shows "?" for it: nobody should lose a run to its last line.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        return super().main(*args, **kwargs)  # type: ignore[misc]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt as interrupt:
            # The exception's text names the files that the command leaves behind.
            name = ctx.find_root().command.name
            ways = (*interrupt.args, ctx.obj and ctx.obj())
            typer.echo("; ".join([f"{name}: interrupted", *filter(None, ways)]), err=True)
            raise typer.Exit(130) from None


class Group(_Polite, TyperGroup):
    """A group of commands."""


class Command(_Polite, TyperCommand):
    """A command, whose docstring is its help. SIGTERM, as `timeout` sends it, ends it as Ctrl-C does: the command
    cleans up, and names the files that it leaves. A process of torchrun ends by SIGTERM at once, and without a word."""

    def __init__(self, *args: Any, help: str | None = None, **kwargs: Any) -> None:
        # Lines end where the source's do; paragraphs are for the terminal to break.
        said = "\n\n".join(" ".join(part.split()) for part in (help or "").split("\n\n"))
        super().__init__(*args, help=said, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        # torchrun ends processes by SIGTERM, also ones that wait for another rank in C, where Python raises nothing.
        if "TORCHELASTIC_RUN_ID" in os.environ:
            return super().invoke(ctx)

        def interrupt(*_: Any) -> NoReturn:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            return super().invoke(ctx)
        finally:
            signal.signal(signal.SIGTERM, before)


class Failed(Exception):
    """A fault that a command has found, and was asked for: its exit code is 1."""


class _Reporting(Command):
    """A command of a group: errors that a user can mend end it in one line that begins with its name. A command that
    goes on, when it is called again, has a function as `ctx.obj` that says so."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(str(error.name))
            way = f"'.[{extra}]' in a clone of the repository" if extra else error.name
            raise _misused(ctx, f"{error.name} is missing: run pip install {way}.") from error
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise _misused(ctx, str(error)) from error
        except (Failed, FloatingPointError, OverflowError, OSError, RuntimeError) as error:
            # Of the errors at run time only those of ranks are made for a user to read.
            if isinstance(error, RuntimeError) and not str(error).startswith(("extract: rank", "train: rank")):
                raise
            console = Console(stderr=True, soft_wrap=True)
            console.print(_named(ctx, _said(error)), style="bold red", markup=False)
            if isinstance(error, OSError) and ctx.obj is not None:
                console.print(ctx.obj(), markup=False)
            raise typer.Exit(1) from None


_EXTRAS = {"datasets": "train", "tokenizers": "train", "transformers": "transformers"}


def _misused(ctx: Any, message: str) -> typer.BadParameter:
    return typer.BadParameter(_named(ctx, message), ctx)


def _named(ctx: Any, message: str) -> str:
    """A message with the command's name in place of that of the function that it comes from."""
    message = re.sub(r"^(gossamer( \w+)+|extract|train(\.\w+)?|Extraction): ", "", message)
    # Arguments of functions are options here.
    options = {option.name: option.opts[0] for option in ctx.command.params if option.opts[0].startswith("--")}
    message = re.sub(r"^\w+(?= must )", lambda found: options.get(found[0], found[0]), message)
    return f"gossamer {ctx.parent.info_name} {ctx.info_name}: {message}"


def _said(error: Exception) -> str:
    """The system's reason, and the file that it concerns."""
    reason, file = getattr(error, "strerror", None) or str(error), getattr(error, "filename", None)
    return f"{reason}: {file}" if file and str(file) not in reason else reason


class Commands(typer.Typer):
    """A group of commands of the command line."""

    def __init__(self, help: str) -> None:
        super().__init__(no_args_is_help=True, add_completion=False, help=help)

    def command(self, *args: Any, **kwargs: Any) -> Any:
        return super().command(*args, cls=_Reporting, **kwargs)


def set_fields(given: list[str]) -> dict[str, Any]:
    """Values by name, of NAME=VALUE each."""
    found = {}
    for item in given:
        name, sign, value = item.partition("=")
        if not sign:
            raise ValueError(f"a field is set as NAME=VALUE, got {item}.")
        if name in found:
            raise ValueError(f"{name} must be given once, got {item} too. Commas separate the values of a sweep.")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def application(function: Callable[..., Any], name: str) -> typer.Typer:
    """A program with one command, `function`."""
    found = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    found.command(name, cls=Command)(function)
    return found
