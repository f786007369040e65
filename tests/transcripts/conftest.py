"""`pytest tests/transcripts --rewrite` writes the transcripts anew, to be read and committed."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the golden transcripts anew")
