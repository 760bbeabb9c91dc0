"""Downloads of published files."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import pathlib
import urllib.error
import urllib.request
from typing import Any

from absl import logging

from dmljax.files.writing import make_folder, sync
from dmljax.hints import hint
from dmljax.weights.entries import Published
from dmljax.weights.installed import get_command, installed
from dmljax.weights.published import PUBLISHED, file_name


def fetch(name: str, *, folder: str | os.PathLike, timeout: float = 60.0) -> pathlib.Path:
    """The path of a published file, which is checked and, if needed, downloaded to `folder`.

    A file in an installed Python package is not downloaded. An interrupted download continues
    where it stopped, if a digest is published with which a wrong continuation can be detected.
    `timeout` is in seconds, for each wait on the network.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no published file is called {name!r}{hint(name, PUBLISHED)}")
    published = PUBLISHED[name]
    if path := installed().get(name):
        return _checked(path, published)
    if "://" not in published.urls[0]:
        raise ValueError(f"{name} is in a Python package: {get_command(name)}")
    folder = pathlib.Path(folder).expanduser()
    path, partial_path = folder / file_name(name), folder / f"{file_name(name)}.part"
    if path.exists():
        return _checked(path, published)
    make_folder(folder)
    with open(partial_path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of a run may fetch the same file
        if path.exists():  # another process finished before this one opened an empty file
            partial_path.unlink(missing_ok=True)
            return _checked(path, published)
        reasons = []
        for url in published.urls:
            if not published.digest:
                file.truncate(0)
            try:
                _download(url, file, timeout)
                break
            except (OSError, http.client.HTTPException) as error:
                reasons.append(_reason(error, url))
        else:
            raise ConnectionError(
                f"{name} could not be downloaded ({'; '.join(reasons)}). Run it again to continue, "
                f"or get {' or '.join(published.urls)} elsewhere and put it at {path}"
            )
        try:
            _checked(partial_path, published)
        except ValueError:
            file.truncate(0)  # not removed: another process may wait for its lock
            raise
        os.replace(partial_path, path)
        sync(folder)
    return path


def _reason(error: Exception, url: str) -> str:
    """Why a download failed, in words."""
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code in (401, 403):
            page = url.partition("/resolve/")[0]
            return f"{reason}: ask for access at {page}, or use a file that you have"
    return str(reason)


def _download(url: str, file: Any, timeout: float) -> None:
    """Appends the missing bytes to `file`."""
    done = os.fstat(file.fileno()).st_size
    headers = {"User-Agent": "dmljax"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range", "") == f"bytes */{done}":
            return  # the file is complete
        file.truncate(0)
        return _download(url, file, timeout)
    with response:
        length = response.headers.get("Content-Length")
        if done and response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise OSError("the server sent other bytes than those that were requested")
        else:
            file.truncate(0)
            done = 0
        while block := response.read(1 << 20):
            file.write(block)
            done += len(block)
            length = None if length is None else int(length) - len(block)
    file.flush()
    os.fsync(file.fileno())
    if length:
        raise OSError(f"the connection ended after {done} bytes, {length} are missing")


def _checked(path: pathlib.Path, published: Published) -> pathlib.Path:
    """`path`, after comparing its digest."""
    algorithm, _, digits = published.digest.partition(":")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, algorithm or "sha256").hexdigest()
    if not digits:
        logging.warning("%s: no digest is published to check it by; SHA-256 %s", path, digest)
    elif not digest.startswith(digits):
        raise ValueError(
            f"{path} is damaged or another file: its {algorithm.upper()} is {digest}, not {digits}"
            f"{'' if len(digits) >= 40 else '...'}: delete it and fetch it again"
        )
    return path
