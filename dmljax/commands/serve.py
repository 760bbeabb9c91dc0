"""Answer over HTTP: embeddings, searches of an index, and a page to drop an image on.

    dmljax serve photos.bundle --index=photos.index
    dmljax serve photos.bundle                                   only embeds
    dmljax serve photos.bundle --index=photos.index --token-file=token.txt --allow-add

Without --host only this machine can connect. Any other host needs --token-file: a file with a token
of 16 characters or more per line, which clients send as `Authorization: Bearer TOKEN`. For other
machines put a proxy in front: launch/serve.nginx.conf. On SIGTERM the process answers the requests
in flight, and ends. docs/serve.md describes the routes.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import refuse
from dmljax.serve.settings import Limits, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", nargs="?", help="folder of the bundle")
    for prefix, section in (("", Settings), ("max-", Limits)):
        for field in dataclasses.fields(section):
            if (text := field.metadata.get("help")) is None:
                continue
            options: dict[str, Any] = {"action": "store_true", "help": text}
            if field.default is not False:
                type_ = str if field.default is None else type(field.default)
                text += "" if field.default is None else " (default %(default)s)"
                options = {"type": type_, "default": field.default, "help": text}
            parser.add_argument(f"--{prefix}{field.name.replace('_', '-')}", **options)


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
    values = vars(arguments)
    limits = Limits(**{x.name: values[f"max_{x.name}"] for x in dataclasses.fields(Limits)})
    names = [field.name for field in dataclasses.fields(Settings) if field.name in values]
    settings = Settings(**{name: values[name] for name in names}, limits=limits)
    settings.check()
    from dmljax.train import compilation

    compilation.keep_programs_or_warn()
    return server.run(settings)
