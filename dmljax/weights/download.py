"""Downloads of published files."""

import contextlib
import hashlib
import http.client
import os
import pathlib
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from absl import logging

from dmljax.files import locks
from dmljax.files.writing import make_folder, sync
from dmljax.hints import hint
from dmljax.weights.published import PUBLISHED, file_name, get_command, installed


def fetch(name: str, *, folder: str | os.PathLike, timeout: float = 60.0) -> pathlib.Path:
    """Returns the path of a published file; checks it and, if needed, downloads it to `folder`.

    A file in an installed Python package is not downloaded. An interrupted download continues
    where it stopped, if the server still has the same file by a digest or an ETag. The vocabulary
    of a tower for text comes along; a failure of that is only logged. `timeout` is in seconds, for
    each wait on the network.
    """
    from dmljax.weights import text  # imports nets

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
        _fetched(name, published.urls, path, published.digest, timeout)
    vocabulary, urls = text.vocabulary_beside(path), text.vocabulary_urls(name)
    if urls and not vocabulary.exists():
        try:
            _fetched(f"the vocabulary of {name}", urls, vocabulary, "", timeout)
        except (OSError, ValueError) as error:
            logging.warning("%s embeds images, but no words: %s", name, error)
    return path


def _fetched(
    name: str, urls: Sequence[str], path: pathlib.Path, digest: str, timeout: float
) -> pathlib.Path:
    """Downloads `path` from the first of `urls` that answers, and returns it."""
    make_folder(path.parent)
    lock_path = path.with_name(f"{path.name}.lock")
    with locks.lock(lock_path, wait=True):  # other processes of a run may fetch the same file
        if not path.exists():
            partial = _downloaded(name, urls, path, digest, timeout)
            os.replace(partial, path)
            for other in path.parent.glob(f"{path.name}.*.part"):  # of files that changed since
                other.unlink()
            sync(path.parent)
        lock_path.unlink(missing_ok=True)
    return path


def _downloaded(
    name: str, urls: Sequence[str], path: pathlib.Path, digest: str, timeout: float
) -> pathlib.Path:
    """Downloads and checks the partial file of `path`, and returns it."""
    reasons = []
    for url in urls:
        try:
            partial, expected = _download(url, path, digest, timeout)
            break
        except (OSError, http.client.HTTPException) as error:
            reasons.append(_reason(error, url))
    else:
        raise ConnectionError(
            f"{name} could not be downloaded ({'; '.join(reasons)}). Run it again to continue, "
            f"or get {' or '.join(urls)} elsewhere and put it at {path}"
        )
    try:
        return _checked(partial, expected)
    except ValueError:
        partial.unlink()
        raise


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
