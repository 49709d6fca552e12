"""Help, output and interruption, which every command of this repository handles in the same way."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer
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
            typer.echo("; ".join([f"{name}: interrupted", *filter(None, interrupt.args)]), err=True)
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


class Commands(typer.Typer):
    """A group of commands of the command line."""

    def __init__(self, help: str) -> None:
        super().__init__(no_args_is_help=True, add_completion=False, help=help)

    def command(self, *args: Any, **kwargs: Any) -> Any:
        return super().command(*args, cls=Command, **kwargs)


def application(function: Callable[..., Any], name: str) -> typer.Typer:
    """A program with one command, `function`."""
    found = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    found.command(name, cls=Command)(function)
    return found
