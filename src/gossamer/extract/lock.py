"""A lock on a folder, of which the operating system lets go when its process ends, however it ends."""

import errno
import sys
import warnings
from pathlib import Path

_HELD = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK)


class Lock:
    """A lock on `folder` that `take` takes, and `close` releases.

    Its file stays where it is: whoever removed it could take it from a run that has just opened it.
    """

    def __init__(self, operator: str, folder: Path) -> None:
        self._operator, self._folder = operator, folder
        self._file = (folder / ".lock").open("ab")

    def close(self) -> None:
        self._file.close()

    def take(self, shared: bool = False) -> None:
        """Takes it alone, or together with others that share it, also after having had it alone.

        Raises ValueError where another run has it, and warns where the file system knows no locks. Windows has none to
        share.
        """
        try:
            if sys.platform == "win32":
                import msvcrt

                if not shared:
                    msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise ValueError(
                    f"{self._operator}: another run writes to {self._folder}. Wait until it has ended, or name another "
                    "folder."
                ) from error
            warnings.warn(
                f"{self._operator}: {self._folder} cannot be locked ({error.strerror}). See to it that no other run "
                "writes to it.",
                stacklevel=3,
            )
