"""Data sets downloaded on request, with their checksums."""

from __future__ import annotations

import hashlib
import shutil
import urllib.request
from pathlib import Path

WIKITEXT2 = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
)
SHA256 = {
    "train.txt": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
}


def fetch_wikitext2(folder: Path, source: str = WIKITEXT2) -> None:
    """Download train.txt and valid.txt of WikiText-2 into `folder`; check files that exist."""
    from rich.progress import wrap_file

    folder.mkdir(parents=True, exist_ok=True)
    for name, expected in SHA256.items():
        path = folder / name
        if not path.exists():
            partial = path.with_name(name + ".part")
            with urllib.request.urlopen(f"{source}/{name}") as answer:
                size = int(answer.headers.get("Content-Length") or 0)
                reader = wrap_file(answer, size, description=name)
                with reader as source_file, partial.open("wb") as file:
                    shutil.copyfileobj(source_file, file)
            _check(partial, expected, name)
            partial.replace(path)
        _check(path, expected, name)


def _check(path: Path, expected: str, name: str) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise OSError(
            f"Expected {name} with SHA-256 {expected[:12]}..., found {found[:12]}...: the file is "
            f"not WikiText-2's. Remove {path} and try again."
        )
