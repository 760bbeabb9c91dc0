"""Serve a bundle and an index over HTTP, with a page to search by image.

    dmljax serve photos.bundle --index=photos.index
    dmljax serve photos.bundle                                   only embeds
    dmljax serve photos.bundle --index=photos.index --token-file=token.txt --allow-add

Without --host only this machine can connect. Any other host needs --token-file: a file with one
token of at least 16 characters per line, which clients send as `Authorization: Bearer TOKEN`. Put a
proxy in front of the service if other machines use it: launch/serve.nginx.conf. At SIGTERM the
service answers the requests in flight and ends. docs/serve.md describes the routes.
"""

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import add_fields, refuse, values_of
from dmljax.serve.settings import Limits, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", help="folder of the bundle")
    add_fields(parser, Settings)
    add_fields(parser, Limits, prefix="max-")


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
    limits = Limits(**values_of(arguments, Limits, prefix="max-"))
    settings = Settings(arguments.bundle, **values_of(arguments, Settings), limits=limits)
    settings.check()
    from dmljax.train import compilation

    compilation.keep_programs()
    return server.run(settings)
