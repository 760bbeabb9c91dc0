"""Answer over HTTP: embeddings, searches of an index, and a page to drop an image on.

    dmljax serve photos.bundle --index=photos.index
    dmljax serve photos.bundle                                   embeds only
    dmljax serve photos.bundle --index=photos.index --host=0.0.0.0 --token-file=token.txt
    dmljax serve photos.bundle --index=photos.index --token-file=token.txt --allow-add

Without --host only this machine can connect. Any other host needs --token-file: a file with a token
of 16 characters or more a line, which clients send as `Authorization: Bearer TOKEN`. Adding and
deleting are off, and need a token. A new bundle or index in the same place is taken over without
dropping a request, within --watch seconds or on SIGHUP. After SIGTERM the process answers the
requests that it has begun, and ends. --images is the folder of the pictures that the page shows; by
default it is the folder that was indexed. docs/serve.md describes the routes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import batch_sizes, refuse
from dmljax.serve.settings import Limits, Settings

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    parser.add_argument("bundle", nargs="?", help="folder of the bundle")
    parser.add_argument("--index", help="index to search: a folder or postgresql://...")
    parser.add_argument("--images", help="folder of the pictures of stored items")
    parser.add_argument("--host", default="127.0.0.1", help="127.0.0.1 by default")
    parser.add_argument("--port", type=int, default=8000, help="8000 by default; 0: a free one")
    parser.add_argument("--token-file", help="file with the tokens that clients must send")
    parser.add_argument("--allow-add", action="store_true", help="clients may add items")
    parser.add_argument("--allow-delete", action="store_true", help="clients may delete items")
    parser.add_argument("--program", default="stablehlo", help="stablehlo (default) or onnx")
    parser.add_argument("--batch-sizes", help="sizes that are compiled, such as 1,4,16,64")
    parser.add_argument("--watch", type=float, default=2.0, help="seconds between looks")
    parser.add_argument("--max-waiting", type=int, default=limits.waiting_images, help="then 503")
    parser.add_argument("--max-connections", type=int, default=limits.connections, help="then 503")
    parser.add_argument("--max-image-bytes", type=int, default=limits.image_bytes, help="then 413")
    parser.add_argument("--max-body-bytes", type=int, default=limits.body_bytes, help="then 413")
    parser.add_argument("--body-seconds", type=float, default=limits.body_seconds)
    parser.add_argument(
        "--drain-seconds", type=int, default=limits.drain_seconds, help="after SIGTERM"
    )
    parser.add_argument("--quiet", action="store_true", help="no line per request on stderr")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("serve", extras)
    if arguments.bundle is None:
        raise ValueError("serve needs a bundle (dmljax serve --help)")
    try:
        from dmljax.serve import server
    except ImportError as error:
        raise ImportError(
            f"the service needs more packages ({error}): pip install 'dmljax[serve]'"
        ) from None
    sizes = ("max_waiting", "max_connections", "max_image_bytes", "max_body_bytes")
    for flag in (*sizes, "watch", "body_seconds"):
        if not (value := getattr(arguments, flag)) > 0:
            raise ValueError(f"--{flag.replace('_', '-')}={value} must be larger than 0")
    if arguments.drain_seconds < 0:
        raise ValueError(f"--drain-seconds={arguments.drain_seconds} must be 0 or larger")
    limits = Limits(
        image_bytes=arguments.max_image_bytes,
        body_bytes=arguments.max_body_bytes,
        waiting_images=arguments.max_waiting,
        connections=arguments.max_connections,
        body_seconds=arguments.body_seconds,
        drain_seconds=arguments.drain_seconds,
    )
    return server.run(
        Settings(
            bundle=arguments.bundle,
            index=arguments.index,
            images=arguments.images,
            host=arguments.host,
            port=arguments.port,
            token_file=arguments.token_file,
            allow_add=arguments.allow_add,
            allow_delete=arguments.allow_delete,
            program=arguments.program,
            batch_sizes=batch_sizes(arguments.batch_sizes),
            watch_seconds=arguments.watch,
            log_requests=not arguments.quiet,
            limits=limits,
        )
    )
