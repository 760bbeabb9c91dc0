"""Downloads of published files."""

import fcntl
import hashlib
import http.client
import os
import pathlib
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import logging

from dmljax.files import reading
from dmljax.files.writing import make_folder, sync, write_json
from dmljax.hints import hint
from dmljax.weights.installed import get_command, installed
from dmljax.weights.published import PUBLISHED, file_name


class _Origin(NamedTuple):
    """Where the bytes of a partial file come from, so that only the same file continues them.

    `etag` is the entity tag of the server's answer, unless it is weak; `sha256` the digest that the
    hub names; `length` the bytes of the whole file. It is written before the file's first byte.
    """

    url: str = ""
    etag: str = ""
    sha256: str = ""
    length: int | None = None


def fetch(name: str, *, folder: str | os.PathLike, timeout: float = 60.0) -> pathlib.Path:
    """Returns the path of a published file; checks it and, if needed, downloads it to `folder`.

    A file in an installed Python package is not downloaded. An interrupted download continues
    where it stopped, if the server still has the same file: a digest is published, or the server
    names a digest (the model hub) or an ETag. The vocabulary of a tower for text comes along; a
    failure of that is only logged. `timeout` is in seconds, for each wait on the network.
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
        _fetched(name, published.urls, path, published.digest, timeout)
    _fetch_vocabulary(name, path, timeout)
    return path


def _fetch_vocabulary(name: str, weights: pathlib.Path, timeout: float) -> None:
    """Downloads the vocabulary of the tower for text beside `weights`, if the net has one."""
    from dmljax.weights import text  # imports nets

    path, urls = text.vocabulary_beside(weights), text.vocabulary_urls(name)
    if not urls or path.exists():
        return
    try:
        _fetched(f"the vocabulary of {name}", urls, path, "", timeout)
    except (OSError, ValueError) as error:
        logging.warning("%s embeds images, but no words: %s", name, error)


def _fetched(
    name: str, urls: Sequence[str], path: pathlib.Path, digest: str, timeout: float
) -> pathlib.Path:
    """Downloads `path` from the first of `urls` that answers, and returns it."""
    partial_path = path.with_name(f"{path.name}.part")
    origin_path = path.with_name(f"{path.name}.part.json")
    make_folder(path.parent)
    with open(partial_path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of a run may fetch the same file
        if path.exists():  # another process finished before this one opened an empty file
            partial_path.unlink(missing_ok=True)
            return _checked(path, digest)
        reasons = []
        first = _read_origin(origin_path).url  # the only address that can continue without a digest
        for url in sorted(urls, key=lambda url: url != first):
            try:
                sha256 = _download(url, file, origin_path, timeout, is_checked=bool(digest))
                break
            except (OSError, http.client.HTTPException) as error:
                reasons.append(_reason(error, url))
        else:
            raise ConnectionError(
                f"{name} could not be downloaded ({'; '.join(reasons)}). Run it again to continue, "
                f"or get {' or '.join(urls)} elsewhere and put it at {path}"
            )
        os.fsync(file.fileno())
        try:
            if digest or not sha256:
                _checked(partial_path, digest)
            else:
                source = f"as {urllib.parse.urlsplit(url).netloc} says"
                _checked(partial_path, f"sha256:{sha256}", source=source)
        except ValueError:
            file.truncate(0)  # not removed: another process may wait for its lock
            raise
        os.replace(partial_path, path)
        origin_path.unlink(missing_ok=True)
        sync(path.parent)
    return path


def _read_origin(path: pathlib.Path) -> _Origin:
    """Reads the origin of a partial file; it is empty if it is not recorded, or damaged."""
    try:
        origin = _Origin(**reading.json_file(path))
    except (OSError, ValueError, TypeError):
        return _Origin()
    is_text = all(isinstance(x, str) for x in (origin.url, origin.etag, origin.sha256))
    return origin if is_text else _Origin()


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
    """Follows redirects, and keeps the SHA-256 that one of them names."""

    sha256 = ""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.sha256 = self.sha256 or _sha256_of_hub(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _sha256_of_hub(headers: Any) -> str:
    """Returns the SHA-256 that huggingface.co names for large files, or ''."""
    value = headers.get("X-Linked-Etag", "").strip('"').lower()
    return value if re.fullmatch("[0-9a-f]{64}", value) else ""


def _download(
    url: str, file: Any, origin_path: pathlib.Path, timeout: float, *, is_checked: bool
) -> str:
    """Appends the missing bytes to `file`; returns the SHA-256 that the hub names, or ''.

    Unless the caller knows a digest (`is_checked`), bytes are only appended to bytes of the same
    address whose ETag or SHA-256 is still the same. Other bytes stay until the server sends better.
    """
    done, origin = os.fstat(file.fileno()).st_size, _read_origin(origin_path)
    is_of_url = origin.url == url and bool(origin.etag or origin.sha256)
    if is_of_url and done and done == origin.length:
        return origin.sha256  # the file is complete
    if not (is_checked or is_of_url):
        done = 0
    headers = {"User-Agent": "dmljax"}
    if done:
        headers["Range"] = f"bytes={done}-"
    if done and is_of_url and origin.etag:
        headers["If-Range"] = origin.etag
    redirects, request = _Redirects(), urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.build_opener(redirects).open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if is_checked and error.headers.get("Content-Range", "") == f"bytes */{done}":
            return ""  # the file is complete
        file.truncate(0)
        return _download(url, file, origin_path, timeout, is_checked=is_checked)
    with response:
        sha256 = redirects.sha256 or _sha256_of_hub(response.headers)
        etag = response.headers.get("ETag", "")
        length = response.headers.get("Content-Length")
        missing = None if length is None else int(length)
        if done and response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise OSError("the server sent other bytes than those that were requested")
            if not (is_checked or _is_same(origin, etag, sha256)):  # a server without If-Range
                response.close()
                file.truncate(0)
                return _download(url, file, origin_path, timeout, is_checked=is_checked)
        else:
            file.truncate(0)
            os.fsync(file.fileno())  # so that no other bytes can lie beside the new origin
            done = 0
            strong = "" if etag.startswith("W/") else etag
            write_json(origin_path, _Origin(url, strong, sha256, missing)._asdict())
        try:
            while block := response.read(1 << 20):
                file.write(block)
                done += len(block)
                missing = None if missing is None else missing - len(block)
        finally:
            file.flush()
    if missing:
        raise OSError(f"the connection ended after {done} bytes, {missing} are missing")
    return sha256


def _is_same(origin: _Origin, etag: str, sha256: str) -> bool:
    """Returns whether an answer with this ETag and SHA-256 belongs to the file of a partial
    download.
    """
    if origin.sha256 and sha256:
        return origin.sha256 == sha256
    return bool(origin.etag) and origin.etag == etag


def _checked(path: pathlib.Path, expected: str, *, source: str = "") -> pathlib.Path:
    """Compares the hash of `path` and returns it; `source` says who names `expected`, if nobody
    else does.
    """
    algorithm, _, digits = expected.partition(":")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, algorithm or "sha256").hexdigest()
    if not digits:
        logging.warning("%s: no digest is published to check it by; SHA-256 %s", path, digest)
    elif not digest.startswith(digits):
        more = "" if len(digits) >= 40 else "..."
        raise ValueError(
            f"{path} is damaged or another file: its {algorithm.upper()} is {digest}, not "
            f"{digits}{more}{', ' if source else ''}{source}: delete it and fetch it again"
        )
    return path
