"""URLs of ledgers on a server, and what may be shown of them: everything but passwords."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

_SCHEME = re.compile(r"postgres(ql)?://")
_SQUEEZED = re.compile(r"postgres(ql)?:[/\\][^/\\]")
_SHOWN = ("host", "hostaddr", "port", "dbname", "user", "service", "sslmode")


def is_url(place: str) -> bool:
    """Whether a place is a server; other URLs are refused, so that none becomes a new file."""
    if _SCHEME.match(place):
        return True
    if scheme := re.match(r"\s*([A-Za-z][\w+.-]*)://", place):
        raise ValueError(
            "Expected a file or a URL that begins with postgresql://, found one that begins with "
            f"{scheme[1]}://."
        )
    return False


def require_path(place: Path | str) -> Path:
    """A place as a path, unless it is a URL that became one."""
    if _SQUEEZED.match(str(place)):
        raise ValueError(
            "Expected the URL of a ledger as text, found a path: Path removes a slash of "
            "postgresql://. Give the text."
        )
    return Path(place)


def shown(url: str) -> str:
    """A URL without its password and without parameters that may be secret.

    A password may hold any character, also ones that should have been percent-encoded: everything
    between the first colon and the last @ is left out.
    """
    rest = _SCHEME.sub("", url)
    before, at, after = rest.rpartition("@")
    place, _, query = after.partition("?")
    user = re.split(r"[:/?#@]", before)[0]
    told = [(name, value) for name, value in parse_qsl(query) if name in _SHOWN]
    return f"postgresql://{user}{at}{place}{'?' if told else ''}{urlencode(told, safe='/,')}"


def without_secrets(text: str, url: str) -> str:
    """What a driver says, unless it repeats a part of a URL that is not shown."""
    hidden = _SCHEME.sub("", url)
    for part in re.split(r"[:/?#@=&,]", shown(url)):
        hidden = hidden.replace(part, " ") if len(part) > 1 else hidden
    secrets = [part for part in re.split(r"[\s:/?#@=&,%]+", hidden) if len(part) > 2]
    names = {"password", "sslpassword", "connect_timeout", "passfile"}
    if any(secret in text for secret in set(secrets) - names):
        return "what the driver says is left out, because it would show a password"
    return " ".join(text.split())


def has_password(url: str) -> bool:
    """Whether a URL tells a password to whoever reads it."""
    before, at, _ = _SCHEME.sub("", url).rpartition("@")
    return bool(at and ":" in before) or "password" in url.partition("?")[2]
