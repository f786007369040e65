"""TLS of a client, and its failures in words."""

from __future__ import annotations

import ssl

from diagnosis.signals import clean_text


def client_context(ca: str) -> ssl.SSLContext:
    """`ca`: a file of certificates to trust, empty for the system's. Raises OSError."""
    return ssl.create_default_context(cafile=ca or None)


def explain(error: BaseException, address: str, ca: str) -> str:
    """One sentence for a failure of TLS; empty where `error` is none."""
    if isinstance(error, ssl.SSLCertVerificationError):
        trusted = f"in {ca}" if ca else "of this system"
        return (
            f"the certificate of the controller at {address} is not trusted ({error.verify_message}): no certificate "
            f"{trusted} vouches for it. Name the file with the right one in UNBROKEN_TLS_CA (`controller.tls_ca`)"
        )
    if isinstance(error, ssl.SSLError):
        return f"what listens at {address} does not speak TLS as it must: {clean_text(error.reason or str(error), 100)}"
    return ""
