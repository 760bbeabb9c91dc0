"""Downloads of published files."""

import contextlib
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
from typing import Any

from absl import logging

from dmljax.files.writing import make_folder, sync
from dmljax.hints import hint
from dmljax.weights.published import PUBLISHED, file_name, get_command, installed


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
    make_folder(path.parent)
    lock_path = path.with_name(f"{path.name}.lock")
    with open(lock_path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of a run may fetch the same file
        if path.exists():  # another process finished before this one opened a new file
            lock_path.unlink(missing_ok=True)
            return _checked(path, digest)
        reasons = []
        for url in urls:
            try:
                partial, sha256 = _download(url, path, digest, timeout)
                break
            except (OSError, http.client.HTTPException) as error:
                reasons.append(_reason(error, url))
        else:
            raise ConnectionError(
                f"{name} could not be downloaded ({'; '.join(reasons)}). Run it again to continue, "
                f"or get {' or '.join(urls)} elsewhere and put it at {path}"
            )
        try:
            if digest or not sha256:
                _checked(partial, digest)
            else:
                source = f"as {urllib.parse.urlsplit(url).netloc} says"
                _checked(partial, f"sha256:{sha256}", source=source)
        except ValueError:
            partial.unlink()
            raise
        os.replace(partial, path)
        for other in path.parent.glob(f"{path.name}.*.part"):  # of files that have changed since
            other.unlink()
        lock_path.unlink()
        sync(path.parent)
    return path


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


def _open(url: str, timeout: float, start: int = 0) -> tuple[Any, str, str]:
    """Requests a file from byte `start` on; returns the answer, the hub's SHA-256 or '', and the
    identity of the file: this SHA-256 or a strong ETag, or ''.
    """
    headers = {"User-Agent": "dmljax"} | ({"Range": f"bytes={start}-"} if start else {})
    redirects, request = _Redirects(), urllib.request.Request(url, headers=headers)
    response = urllib.request.build_opener(redirects).open(request, timeout=timeout)
    sha256 = redirects.sha256 or _sha256_of_hub(response.headers)
    etag = response.headers.get("ETag", "W/")
    return response, sha256, sha256 or ("" if etag.startswith("W/") else f"{url} {etag}")


def _download(
    url: str, path: pathlib.Path, digest: str, timeout: float
) -> tuple[pathlib.Path, str]:
    """Completes the partial file of an address; returns its path and the hub's SHA-256, or ''.

    The name of a partial file has its identity, so that only the same file continues it.
    """
    response, sha256, identity = _open(url, timeout)
    partial = partial_path(path, digest or identity)
    with contextlib.ExitStack() as stack, open(partial, "ab") as file:
        stack.enter_context(response)
        length = int(response.headers.get("Content-Length", -1))
        done = file.tell() if digest or identity else 0
        if 0 < done < length:
            response.close()
            response, _, identity_of_rest = _open(url, timeout, start=done)
            stack.enter_context(response)
            if response.status != 206:
                done = 0  # a server without ranges
            elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise OSError("the server sent other bytes than those that were requested")
            elif not digest and identity_of_rest != identity:
                raise OSError("the file changed meanwhile")
        elif done != length:
            done = 0
        file.truncate(done)
        while done != length and (block := response.read(1 << 20)):
            file.write(block)
            done += len(block)
        file.flush()
        os.fsync(file.fileno())
    if done < length:
        raise OSError(f"the connection ended after {done} bytes, {length - done} are missing")
    return partial, sha256


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
