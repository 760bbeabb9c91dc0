"""The control groups of this process, by which a container or a batch job is limited."""

import pathlib
from collections.abc import Iterator


def folders(controller: str, root: pathlib.Path = pathlib.Path("/")) -> Iterator[pathlib.Path]:
    """The folder of each group of this process that `controller` can limit, and of its parents.

    `controller` is "memory" or "cpu". Groups of version 1 and 2 have files of different names. See
    https://docs.kernel.org/admin-guide/cgroup-v2.html and, for version 1, cgroup-v1/ there. In a
    container, the folders show its own group as the topmost one.
    """
    for line in lines(root / "proc/self/cgroup"):
        kinds, path = line.split(":", 2)[1:]
        for kind in {"", controller}.intersection(kinds.split(",")):
            names = pathlib.PurePosixPath(path.lstrip("/"))
            for group in [names, *names.parents]:
                yield root / "sys/fs/cgroup" / kind / group


def lines(path: pathlib.Path) -> list[str]:
    """The lines of a file of the system; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
