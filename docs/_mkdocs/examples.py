"""An extension of Griffe, which reads the docstrings of the reference.

Examples, which stand in a docstring as an interpreter shows them, become blocks of code. And a function takes its
public place where the file that defines it has the same name, as `rowsparse.matmul` in `rowsparse/matmul.py`.
"""

import re
from collections.abc import Iterator
from typing import Any

from griffe import Alias, Extension, Module, Object

EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.S | re.M)


class Examples(Extension):
    def on_package(self, *, pkg: Module, **_: Any) -> None:
        found = list(_objects(pkg))
        for docstring in (each.docstring for each in found if each.docstring):
            docstring.value = EXAMPLE.sub(lambda m: f"\n```pycon\n{m[0].rstrip()}\n```\n", docstring.value)
        public = [
            (room, name, _defined(room.members[name]))
            for room in found
            for name in map(str, room.exports or ())
            if isinstance(room.members.get(name), (Alias, Module))
        ]
        for room, name, definition in public:
            room.members[name] = Alias(name, definition, parent=room)


def _objects(within: Object) -> Iterator[Any]:
    yield within
    for member in within.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _defined(member: Module | Alias) -> Object:
    """The object that a public name stands for; a file stands for the function of its name."""
    if isinstance(member, Alias):
        member = member.final_target
    return member.members.get(member.name, member) if isinstance(member, Module) else member
