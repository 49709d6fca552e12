"""Runs that end before their last step."""

from collections.abc import Callable


class Stopped(Exception):
    """The end of a run from within."""


def stop(at: int) -> Callable[[dict[str, float]], None]:
    def show(record: dict[str, float]) -> None:
        if record["step"] == at:
            raise Stopped

    return show
