"""Processes that extract or train together: all of them learn the results of each, and if one fails, all fail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# A rank without a shard in the last round waits for the ranks that have one. The death of a rank shows at once anyway.
_PATIENCE = timedelta(hours=6)


class Ranks:
    """This process among those of `torch.distributed`, or alone where that is not initialised.

    An error that leaves a `with` reaches the others at their next `share`. An interrupt closes the connections at once,
    and the others then raise as for a rank that is gone.
    """

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self.rank, self.size = 0, 1
        self._group: Any = None
        self._all_know = False
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            # A group of its own, so that a thread can speak in it while others use theirs, and of gloo, which needs no
            # GPU: descriptions, statistics and checkpoints, which are in main memory, go through it.
            try:
                # The first group shows within the usual time whether all ranks come; from then on they may wait for
                # longer. A rank that has the second group knows that all have the first, and may close that.
                first = dist.new_group(backend="gloo")
                self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
                dist.destroy_process_group(first)
            except RuntimeError as error:
                raise RuntimeError(
                    f"{operator}: torch.distributed has {self.size} ranks, and not all of them have come here. Call it "
                    "on each of them, or before torch.distributed.init_process_group."
                ) from error

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._group is None:
            return
        try:
            if isinstance(error, Exception) and not self._all_know:
                self._tell(error)
        finally:
            dist.destroy_process_group(self._group)
            # The last reference: only then gloo closes its connections, and ranks that still wait for this one end.
            self._group = None

    def share(self, make: Callable[[], T]) -> list[T]:
        """Calls `make` on each rank; gives rank 0 the results of all ranks, and the others their own.

        Raises the errors of `make`, and RuntimeError where it raises on another rank or one is gone.
        """
        if self._group is None:
            return [make()]
        try:
            mine = make()
        except Exception as error:
            self._tell(error)
            raise
        self._tell(None)
        found: list[Any] | None = [None] * self.size if self.rank == 0 else None
        try:
            dist.gather_object(mine, found, dst=0, group=self._group)
        except RuntimeError as error:
            self._all_know = True
            self._lost(error)
        return [mine] if found is None else found

    def check_alike(self, mine: dict[str, Any]) -> None:
        """Raises, on all ranks, where one has other values than rank 0."""
        found = self.share(lambda: mine)

        def compare() -> None:
            for rank, other in enumerate(found[1:], 1):
                for name in mine | other:
                    # As text: NaN is not equal to itself.
                    if repr(mine.get(name)) != repr(other.get(name)):
                        raise ValueError(
                            f"{self._operator}: every rank must get the same arguments, and rank {rank} has another "
                            f"{name} than rank 0: {other.get(name)!r}, not {mine.get(name)!r}."
                        )

        self.share(compare)

    def _tell(self, error: Exception | None) -> None:
        """Tells the other ranks an error of this one, if there is any; raises where only another rank has one."""
        said: list[str | None] = [None] * self.size
        try:
            dist.all_gather_object(said, error and f"{type(error).__name__}: {error}", group=self._group)
        except RuntimeError as lost:
            self._all_know = True
            if error is None:
                self._lost(lost)
            return
        self._all_know = any(said)
        for rank, message in enumerate(said):
            if message is not None and error is None:
                raise RuntimeError(
                    f"{self._operator}: rank {rank} of {self.size} failed with {message.rstrip('.')}. All ranks stop; "
                    "the same call goes on from the last whole shard or checkpoint."
                )

    def _lost(self, error: Exception) -> NoReturn:
        raise RuntimeError(
            f"{self._operator}: rank {self.rank} of {self.size} lost the others, for one of them has ended. The same "
            "call goes on from the last whole shard or checkpoint."
        ) from error
