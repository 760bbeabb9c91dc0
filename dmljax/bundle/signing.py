"""A signature of a bundle: who wrote it, where the digests only say that nothing was changed since.

Ed25519 over the identity of the manifest, which covers every file. The keys are PEM files, such as
`openssl genpkey -algorithm ed25519 -out key.pem` and `openssl pkey -in key.pem -pubout -out
public.pem` write.
"""

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from dmljax.bundle import files
from dmljax.bundle.errors import BadBundle
from dmljax.files.writing import atomic_writer


def signer(key: str | os.PathLike) -> Callable[[bytes], bytes]:
    """The function that signs bytes with the private key in a PEM file."""
    _, serialization, ed25519 = _cryptography()
    path = pathlib.Path(key)
    try:
        loaded = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no private key in PEM without a password") from error
    if not isinstance(loaded, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{path} is no key of Ed25519: openssl genpkey -algorithm ed25519")
    return loaded.sign


def sign(folder: str | os.PathLike, sign_fn: Callable[[bytes], bytes]) -> None:
    """Writes the signature of a bundle into its folder."""
    folder = pathlib.Path(folder)
    manifest = files.read_manifest(folder)
    with atomic_writer(folder / files.SIGNATURE, "wb") as file:
        file.write(sign_fn(_message(folder, manifest)))


def check(folder: pathlib.Path, manifest: Mapping[str, Any], public_key: str | os.PathLike) -> None:
    """Raises `BadBundle` unless the owner of a public key has signed this manifest."""
    exceptions, serialization, ed25519 = _cryptography()
    path = pathlib.Path(public_key)
    try:
        loaded = serialization.load_pem_public_key(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no public key in PEM") from error
    if not isinstance(loaded, ed25519.Ed25519PublicKey):
        raise ValueError(f"{path} is no public key of Ed25519")
    try:
        loaded.verify(files.signature(folder), _message(folder, manifest))
    except exceptions.InvalidSignature:
        raise BadBundle(
            f"{folder} was not signed by the owner of {path}, or changed since"
        ) from None


def _message(folder: pathlib.Path, manifest: Mapping[str, Any]) -> bytes:
    if "identity" not in manifest:
        raise BadBundle(
            f"{folder} has no identity to sign: it is older. Write it again: dmljax bundle rebuild "
            f"{folder} --out=NEW.bundle"
        )
    return f"dmljax bundle {manifest['identity']}".encode()


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ImportError("signatures need cryptography: pip install 'dmljax[sign]'") from None
    return exceptions, serialization, ed25519
