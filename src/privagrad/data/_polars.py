"""Polars, which is only needed to read tables with named columns."""

from __future__ import annotations

from typing import Any


def polars() -> Any:
    try:
        import polars
    except ImportError as error:
        raise ImportError(
            "Reading tables needs Polars: pip install 'privagrad[tables]'."
        ) from error
    return polars
