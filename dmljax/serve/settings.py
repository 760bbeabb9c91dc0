"""The settings of a service, and the checks without which it does not start."""

import dataclasses
import ipaddress
import os
import pathlib
import re

_SHORTEST_TOKEN = 16
_HEADER = re.compile(r"[A-Za-z0-9-]+")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits on the size, the time and the number of requests."""

    image_bytes: int = 32 << 20
    body_bytes: int = 64 << 20
    answer_bytes: int = 64 << 20
    values: int = 1 << 21  # in a body of JSON or msgpack: numbers, texts, lists, keys, ...
    memory_bytes: int = 3 << 29  # of bodies, values, images and answers of all requests together
    images: int = 64  # of one request
    items: int = 1000  # of one request that adds or deletes
    queries: int = 256  # vectors, ids or texts of one search
    multipart_fields: int = 16
    waiting_images: int = 512  # images and texts that are decoded or embedded at a time
    decode_seconds: float = 10.0  # of one image
    decode_bytes: int = 1 << 30  # memory to decode one image, and all at a time
    connections: int = 1000
    requests: int = 800  # at a time
    body_seconds: float = 20.0  # to receive the head, and to receive the body
    write_seconds: float = 20.0  # for a client to take an answer
    request_seconds: float = 60.0
    idle_seconds: int = 10  # of a connection that is kept alive
    drain_seconds: int = 25  # after SIGTERM


@dataclasses.dataclass(frozen=True)
class Settings:
    """A service.

    `images` is the folder of the pictures of stored items; by default the ones from which the
    index was made, where the index knows them.
    """

    bundle: str
    index: str | None = None
    images: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    token_file: str | None = None
    allow_add: bool = False
    allow_delete: bool = False
    program: str = "stablehlo"
    batch_sizes: tuple[int, ...] | None = None
    decoders: int | None = None  # processes that decode; None: `workers.default_count`
    client_header: str | None = None  # in which a proxy puts the address of the client
    batch_wait: float = 0.002  # seconds that an image waits for others that are being decoded
    watch_seconds: float = 2.0  # between looks at the bundle and the index
    log_requests: bool = True
    limits: Limits = Limits()

    def check(self) -> None:
        """Raises for settings that would be unsafe or impossible."""
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port={self.port} must lie between 0 and 65535")
        if self.decoders is not None and not 1 <= self.decoders <= 256:
            raise ValueError(f"--decoders={self.decoders} must lie between 1 and 256")
        if self.client_header is not None and not _HEADER.fullmatch(self.client_header):
            raise ValueError(
                f"--client-header={self.client_header} is no name of a header, such as X-Real-IP"
            )
        limits = self.limits
        if limits.memory_bytes < (least := limits.decode_bytes * 3 // 2):
            raise ValueError(
                f"--max-memory-bytes={limits.memory_bytes} must be {least} or more: one and a half "
                f"times --max-decode-bytes={limits.decode_bytes}"
            )
        if self.token_file is None:
            if not is_loopback(self.host):
                raise ValueError(
                    f"--host={self.host} can be reached from other machines: it needs "
                    "--token-file=FILE (or leave --host at 127.0.0.1)"
                )
            if self.allow_add or self.allow_delete:
                flag = "--allow-add" if self.allow_add else "--allow-delete"
                raise ValueError(f"{flag} needs --token-file=FILE, which says who may change")
        if self.index is None and (self.allow_add or self.allow_delete or self.images):
            raise ValueError("--images, --allow-add and --allow-delete need --index")


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def read_tokens(path: str | os.PathLike | None) -> tuple[bytes, ...]:
    """The tokens of a file, one a line; none without a file."""
    if path is None:
        return ()
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise OSError(f"--token-file={path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--token-file={path} is not text: write one token a line") from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens:
        raise ValueError(f"--token-file={path} is empty: write a token, such as 32 random letters")
    for token in tokens:
        if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"--token-file={path}: a token has {_SHORTEST_TOKEN} or more printable characters "
                "of ASCII; one line is one token"
            )
    return tuple(token.encode() for token in tokens)
