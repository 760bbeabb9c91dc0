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

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import batch_sizes, refuse
from dmljax.serve.settings import Limits, Settings

# The flags that set a limit: the field of `Limits`, and the help.
_LIMITS = {
    "max_image_bytes": ("image_bytes", "of one image; a larger one gets 413"),
    "max_body_bytes": ("body_bytes", "of one request; a larger one gets 413"),
    "max_answer_bytes": ("answer_bytes", "of one answer; instead of a larger one, 413"),
    "max_values": ("values", "in a body of JSON or msgpack; more get 413"),
    "max_memory_bytes": ("memory_bytes", "of all requests together; what does not fit gets 503"),
    "max_images": ("images", "of one request; more get 413"),
    "max_items": ("items", "that one request adds or deletes; more get 413"),
    "max_queries": ("queries", "vectors, ids or texts of one search; more get 413"),
    "max_fields": ("multipart_fields", "of a form; more get 400"),
    "max_waiting": ("waiting_images", "images and texts that wait or are computed; others get 503"),
    "decode_seconds": ("decode_seconds", "to decode one image; a slower one gets 413"),
    "max_decode_bytes": ("decode_bytes", "memory to decode one image; more gets 413"),
    "max_connections": ("connections", "open at a time; others get 503"),
    "max_requests": ("requests", "at a time; others get 503"),
    "body_seconds": ("body_seconds", "to receive the head, and to receive the body"),
    "write_seconds": ("write_seconds", "for a client to take an answer"),
    "request_seconds": ("request_seconds", "to answer one request; then 504"),
    "idle_seconds": ("idle_seconds", "of a connection without a request"),
    "drain_seconds": ("drain_seconds", "from SIGTERM to the end of the process"),
}
# The flags with the names of fields of `Settings`.
_SETTINGS: tuple[str, ...] = (
    "bundle",
    "index",
    "images",
    "host",
    "port",
    "token_file",
    "allow_add",
    "allow_delete",
)
_SETTINGS += ("program", "decoders", "client_header")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", help="folder of the bundle")
    parser.add_argument("--index", help="index to search: a folder or postgresql://...")
    parser.add_argument("--images", help="folder of the pictures of stored items")
    parser.add_argument("--host", default=Settings.host, help="%(default)s by default")
    parser.add_argument(
        "--port", type=int, default=Settings.port, help="%(default)s by default; 0: a free one"
    )
    parser.add_argument("--token-file", help="file with the tokens that clients must send")
    parser.add_argument("--allow-add", action="store_true", help="clients may add items")
    parser.add_argument("--allow-delete", action="store_true", help="clients may delete items")
    parser.add_argument("--program", default=Settings.program, help="stablehlo (default) or onnx")
    parser.add_argument("--batch-sizes", help="sizes that are compiled, such as 1,4,16,64")
    parser.add_argument("--decoders", type=int, help="processes that decode images")
    parser.add_argument(
        "--client-header", help="header with the address of a client behind a proxy: X-Real-IP"
    )
    parser.add_argument(
        "--watch",
        type=float,
        default=Settings.watch_seconds,
        help="seconds between two looks for a new bundle or index",
    )
    for flag, (field, help_) in _LIMITS.items():
        default = getattr(Limits(), field)
        parser.add_argument(
            f"--{flag.replace('_', '-')}",
            type=type(default),
            default=default,
            metavar=next((unit for unit in ("SECONDS", "BYTES") if unit.lower() in flag), "N"),
            help=f"{help_} (default {default:,})",
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
    for flag in ("watch", *_LIMITS):
        value = getattr(arguments, flag)
        may_be_zero = flag == "drain_seconds"
        if not (0 if may_be_zero else 1e-9) <= value < float("inf"):
            least = "0 or larger" if may_be_zero else "larger than 0"
            raise ValueError(f"--{flag.replace('_', '-')}={value} must be {least}, and finite")
    limits = {field: getattr(arguments, flag) for flag, (field, _) in _LIMITS.items()}
    settings = Settings(
        **{name: getattr(arguments, name) for name in _SETTINGS},
        batch_sizes=batch_sizes(arguments.batch_sizes),
        watch_seconds=arguments.watch,
        log_requests=not arguments.quiet,
        limits=Limits(**limits),
    )
    from dmljax.train import compilation

    settings.check()
    compilation.keep_programs_or_warn()
    return server.run(settings)
