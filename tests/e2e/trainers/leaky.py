"""A trainer that prints secrets, as scripts do when they fail: what it was called with, its environment, its requests.

None of them is real. Each value stands here once, so that a test can look for it everywhere else.
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

SECRETS = {
    "hub": "hf_QwErTyUiOpAsDfGhJkLz",
    "wandb": "0f1e2d3c4b5a69788796a5b4c3d2e1f001122334",
    "aws_id": "AKIAQ3EGRZ7EXAMPLE12",
    "aws_key": "uQ8zXw3v/5tYb7Nc+2mLk9JhGf6DsAqPoIuYtReW",
    "database": "gr4n1te-fox",
    "bearer": "dGhpcyBpcyBub3QgcmVhbA",
    "jwt": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJub2JvZHkifQ.c2lnbmF0dXJl",
    "signature": "5ca1ab1e0ddba11c0ffee",
    "api": "sk-proj-9x8c7v6b5n4m3q2w1e",
    "git": "ghp_0aZ9yX8wV7uT6sR5qP4oN3mL2kJ1",
    "cookie": "sid-7c6b5a4d3e2f",
    "plain": "correct-horse-battery",
    "key": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7",
    "option": "orange-cab-17",
}


def requests() -> None:
    """What libraries log of their requests."""
    print(
        f"GET https://bucket.example/data?X-Amz-Credential={SECRETS['aws_id']}%2F2026&X-Amz-Signature={SECRETS['signature']}"
    )
    print(f"> Authorization: Bearer {SECRETS['bearer']}\n> Cookie: session={SECRETS['cookie']}")
    print(f"boto credentials: ({SECRETS['aws_id']!r}, {SECRETS['aws_key']!r})")
    print(f"remote: https://{SECRETS['git']}@git.example/x.git, session {SECRETS['jwt']}", flush=True)


@record
def main() -> None:
    print(f"arguments: {sys.argv}")
    print({name: value for name, value in os.environ.items() if name.startswith("LEAK_")})
    requests()
    print(f"-----BEGIN PRIVATE KEY-----\n{SECRETS['key']}\n-----END PRIVATE KEY-----", file=sys.stderr, flush=True)
    if os.environ["RANK"] == "1":
        token, password = SECRETS["hub"], SECRETS["plain"]
        raise OSError(
            f"[Errno 5] Input/output error: '/data' ({token=}, {password=}, api_key={SECRETS['api']},"
            f" cache=redis://:{SECRETS['database']}@cache:6379)\n-----BEGIN RSA PRIVATE KEY-----\n{SECRETS['key']}\n"
        )
    sys.stdin.readline()  # until it is ended
    import time

    time.sleep(600)


if __name__ == "__main__":
    main()
