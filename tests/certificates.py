"""A certificate authority for one test, and what it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """Signs certificates for host names; made by the ``openssl`` program."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.certificate = directory / "ca.pem"
        self._key = directory / "ca.key"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=test authority"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def sign(self, alternative: str) -> tuple[Path, Path]:
        """The files of a server's certificate and of its key.

        ``alternative`` has its names, such as ``DNS:localhost,IP:127.0.0.1``.
        """
        name = alternative.replace(":", "_").replace(",", "_")
        key, chain = self._directory / f"{name}.key", self._directory / f"{name}.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=server"),
            *("-addext", f"subjectAltName={alternative}"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", str(self.certificate), "-CAkey", str(self._key)),
            *("-keyout", str(key), "-out", str(chain)),
        )
        return chain, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
