"""The command line (extra `cli`): `gossamer doctor`, `bench`, `demo`, `sae` and `train`."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_COMMANDS = {
    "doctor": (
        "gossamer.cli.doctor",
        "Show versions and devices, say what computes each function on them, check the results.",
    ),
    "bench": ("gossamer.cli.bench.command", "Measure gossamer beside its peers: table, JSON and plots."),
    "demo": ("gossamer.cli.demo", "Train small models on real text, run every room beside its dense way, and report."),
    "sae": ("gossamer.cli.sae", "Extract a sparse autoencoder's latents to disk, and look at them."),
    "train": ("gossamer.cli.train", "Train transformers whose feed-forward blocks become sparse."),
}

main: Callable[[], Any]

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise

    def main() -> None:
        """Say which extra the command line needs."""
        raise SystemExit(
            "gossamer: the command line needs the extra \"cli\": run pip install '.[cli]' in a clone of the repository."
        )

else:

    class _LazyGroup(TyperGroup):
        """Knows its commands by a line of help alone; imports one when it is invoked, so that help stays fast."""

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            if name in _COMMANDS:
                command = _load(name)
            return name, command, rest

        def main(self, *args: Any, **kwargs: Any) -> Any:
            # A terminal that lacks a character shows "?" for it: nobody should lose a run to its last line.
            if isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(errors="replace")
            return super().main(*args, **kwargs)

        def invoke(self, ctx: Any) -> Any:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as interrupt:
                # A command that has something to say about what it leaves behind says it in the exception.
                typer.echo("; ".join(["gossamer: interrupted", *map(str, interrupt.args)]), err=True)
                raise typer.Exit(130) from None

    def _load(name: str) -> Any:
        command = getattr(import_module(_COMMANDS[name][0]), name)
        if isinstance(command, typer.Typer):
            return typer.main.get_command(command)
        single = typer.Typer(add_completion=False)
        # Lines end where the source's do; paragraphs are for the terminal to break.
        said = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
        single.command(name, help=said)(command)
        return typer.main.get_command(single)

    def _placeholder() -> None:
        raise RuntimeError("gossamer: a command's placeholder was run instead of the command.")

    main = typer.Typer(
        name="gossamer",
        cls=_LazyGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_show_locals=False,
        help="Sparse and fused transformer operators for PyTorch.",
    )
    for _name, (_, _help) in _COMMANDS.items():
        main.command(_name, help=_help)(_placeholder)

    @main.callback(invoke_without_command=True)
    def _version(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
        if version:
            from gossamer import __version__

            typer.echo(f"gossamer {__version__}")
            raise typer.Exit


__all__ = ["main"]
