"""`python -m privagrad` is the command `privagrad`."""

from __future__ import annotations

from privagrad.cli import app

if __name__ == "__main__":
    app()
