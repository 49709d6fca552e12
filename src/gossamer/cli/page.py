"""One HTML page that needs no other file, and its parts, from which the commands make their reports."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

# Made visible where a line of text must stay one line.
_VISIBLE = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


def page(title: str, body: str) -> str:
    """The whole page."""
    style = files("gossamer.cli").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """The main figures, each with a short name."""
    shown = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in figures
    )
    return f'<section class="tiles">{shown}</section>'


def table(caption: str, names: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """A table whose first column names the rows."""
    head = "".join(f"<th{' class=number' if i else ''}>{escape(name)}</th>" for i, name in enumerate(names))
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f'<td class="number">{escape(cell)}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def context(value: float, before: str, marked: str, after: str) -> str:
    """A line of a list: a marked piece of text, the text around it, and a value that the pointer shows."""
    return (
        f'<li class="context" title="{value:.3f}"><span class="text before"><span>{line(before)}</span></span>'
        f'<span class="text"><mark>{line(marked)}</mark></span><span class="text after">{line(after)}</span></li>'
    )


def counted(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def line(string: str) -> str:
    """Text from outside, escaped, and visible on one line."""
    return escape(visible(string))


def visible(string: str) -> str:
    """Text on one line, in which every character can be seen."""
    return "".join(
        _VISIBLE.get(c, c if c.isprintable() else c.encode("unicode_escape").decode("ascii")) for c in string
    )
