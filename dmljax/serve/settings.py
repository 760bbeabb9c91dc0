"""The settings and limits of a service, and the checks without which it does not start.

`dmljax serve` makes one flag of every field, with the default and the help that are written here.
"""

import dataclasses
import ipaddress
import math
import os
import pathlib
from collections.abc import Iterator
from typing import Any

_SHORTEST_TOKEN = 16


def _field(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on one request, on its answer, and on the requests in flight."""

    body_bytes: int = _field(32 << 20, "bytes of a request body; a larger one gets 413")
    pixels: int = _field(25_000_000, "pixels of an image; a larger one gets 413")
    entries: int = _field(128, "images, texts, vectors, ids or items of a request; more get 413")
    hits: int = _field(2000, "hits in an answer: k times the number of queries; more get 413")
    seconds: float = _field(20.0, "seconds to answer a request, and to drain after SIGTERM")
    requests: int = _field(64, "requests in flight; further ones get 503 and may try again")


@dataclasses.dataclass(frozen=True)
class Settings:
    """A service: what it serves, where, and what its clients may do."""

    bundle: str
    index: str | None = _field(None, "index to search: a folder or postgresql://...")
    images: str | None = _field(
        None, "folder with the images of stored items; by default the indexed folder"
    )
    host: str = _field("127.0.0.1", "address to listen on")
    port: int = _field(8000, "port to listen on; 0 takes a free one")
    token_file: str | None = _field(
        None, "file with one token per line; clients must send one of them"
    )
    allow_add: bool = _field(False, "let clients add items")
    allow_delete: bool = _field(False, "let clients delete items")
    program: str = _field("stablehlo", "program of the bundle: stablehlo or onnx")
    decoders: int = _field(
        0, "worker processes that decode images; 0 takes one per core, but at least two"
    )
    quiet: bool = _field(False, "do not log requests")
    limits: Limits = Limits()

    def check(self) -> None:
        """Raises `ValueError` for settings that are unsafe or impossible."""
        if problem := next(self._problems(), None):
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        if not 0 <= self.port < 65536:
            yield f"--port={self.port} must lie between 0 and 65535"
        if not 0 <= self.decoders <= 256:
            yield f"--decoders={self.decoders} must lie between 0 and 256"
        for name, value in dataclasses.asdict(self.limits).items():
            if not 0 < value < math.inf:
                yield f"--max-{name.replace('_', '-')}={value} must be larger than 0, and finite"
        if self.token_file is None and not is_loopback(self.host):
            yield (
                f"--host={self.host} can be reached from other machines: it needs "
                "--token-file=FILE (or leave --host at 127.0.0.1)"
            )
        if self.token_file is None and (self.allow_add or self.allow_delete):
            yield "--allow-add and --allow-delete need --token-file=FILE"
        if self.index is None and (self.allow_add or self.allow_delete or self.images):
            yield "--images, --allow-add and --allow-delete need --index"


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_tokens(path: str | os.PathLike | None) -> tuple[bytes, ...]:
    """Reads the tokens in a file, one per line; without a file there are none."""
    if path is None:
        return ()
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise OSError(f"--token-file={path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        text = "\0"
    tokens = [line.strip() for line in text.split("\n") if line.strip()]
    if not tokens or any(
        len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable()
        for token in tokens
    ):
        raise ValueError(
            f"--token-file={path} must have a token in each line, of {_SHORTEST_TOKEN} or more "
            "printable ASCII characters"
        )
    return tuple(token.encode() for token in tokens)
