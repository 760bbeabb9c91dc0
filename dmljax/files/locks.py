"""Locks of the operating system (`flock`), which the system releases when the process ends."""

import fcntl
import os
import pathlib
from typing import IO


class Taken(Exception):
    """Another process holds the lock. The message names the owner if it is known."""


def lock(path: pathlib.Path, *, shared: bool = False, wait: bool = False) -> IO[str]:
    """Locks the file `path`, and returns it open: closing the file releases the lock.

    An exclusive lock writes the process and the host into the file, and `Taken` names them.
    `shared` locks only exclude exclusive locks. With `wait`, the call waits until the lock is free.
    A child process that inherits the file also holds the lock.
    """
    # The file may be read-only; NFS gives shared locks only on files that can be read.
    file = path.open("r" if shared and path.exists() else "a+")
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(file, kind | (0 if wait else fcntl.LOCK_NB))
        if not shared:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {os.uname().nodename}")
            file.flush()
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise Taken(owner) from None
    except BaseException:
        file.close()
        raise
    return file
