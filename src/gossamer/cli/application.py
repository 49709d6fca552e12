"""Help, output and interruption, which every command of this repository handles in the same way."""

from __future__ import annotations

import io
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
            typer.echo("; ".join([f"{ctx.find_root().command.name}: interrupted", *map(str, interrupt.args)]), err=True)
            raise typer.Exit(130) from None


class Group(_Polite, TyperGroup):
    """A group of commands."""


class _Command(_Polite, TyperCommand):
    """A command alone. SIGTERM, as `timeout` sends it, ends it as Ctrl-C does: the command cleans up, and names the
    files that it leaves."""

    def invoke(self, ctx: Any) -> Any:
        def interrupt(*_: Any) -> NoReturn:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            return super().invoke(ctx)
        finally:
            signal.signal(signal.SIGTERM, before)


def application(function: Callable[..., Any], name: str) -> typer.Typer:
    """A program with one command: `function`, whose docstring is its help."""
    found = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    # Lines end where the source's do; paragraphs are for the terminal to break.
    said = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
    found.command(name, cls=_Command, help=said)(function)
    return found
