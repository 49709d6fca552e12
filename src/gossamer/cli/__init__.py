"""The command line: `gossamer doctor`, `gossamer sae` and `gossamer train` (extra `cli`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_COMMANDS = {
    "doctor": (
        "gossamer.cli.doctor",
        "Show versions and devices, name the code that computes each function on them, and check its results.",
    ),
    "sae": ("gossamer.cli.sae", "Train sparse autoencoders, extract their latents to disk, and look at them."),
    "train": ("gossamer.cli.train", "Train transformers whose feed-forward blocks become sparse."),
}

main: Callable[[], Any]

try:
    import typer
except ModuleNotFoundError as error:
    if error.name != "typer":
        raise

    def main() -> None:
        """Say which extra the command line needs."""
        raise SystemExit(
            "gossamer: the command line needs the extra \"cli\": run pip install '.[cli]' in a clone of the repository."
        )

else:
    from gossamer.cli.application import Group, application

    class _LazyGroup(Group):
        """Knows its commands by a line of help alone; imports one when it is invoked, so that help stays fast."""

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, command, rest = super().resolve_command(ctx, args)
            if name in _COMMANDS:
                command = _load(name)
            return name, command, rest

    def _load(name: str) -> Any:
        command = getattr(import_module(_COMMANDS[name][0]), name)
        return typer.main.get_command(command if isinstance(command, typer.Typer) else application(command, name))

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
