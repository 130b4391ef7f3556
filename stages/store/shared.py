"""Where a project keeps its runs: in its own folder, or in a store that several machines share.

`turnwise.toml` in the project folder names a shared store; docs/how-to/machines.md shows one. It holds no secret: the
libraries that open the store read passwords and keys from the environment, or from files of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.frame.types import UsageError

FILE = "turnwise.toml"
KEYS = ("uri", "artifacts")


@dataclass(frozen=True)
class Shared:
    """uri: of a PostgreSQL database. artifacts: s3://bucket/prefix, or the path of a folder that every machine sees."""

    uri: str
    artifacts: str


def shared_store(home: Path) -> Shared | None:
    """What the project's file says; None where there is no file, or no section [tracking] in it. Raises UsageError."""
    file = home / FILE
    if not file.is_file():
        return None
    import tomllib

    try:
        stored = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} was wanted as TOML, but it cannot be read ({error}). Mend it") from None
    if others := stored.keys() - {"tracking"}:
        raise UsageError(f"{file}: wanted the section [tracking] only, found {sorted(others)[0]!r}. Take that out")
    return _checked(file, stored["tracking"]) if stored else None


def _checked(file: Path, found: Any) -> Shared:
    if not isinstance(found, dict) or found.keys() != set(KEYS) or not all(isinstance(v, str) for v in found.values()):
        raise UsageError(f'{file}: [tracking] wanted the two texts uri = "..." and artifacts = "...". Give it both')
    uri, place = found["uri"], found["artifacts"].rstrip("/")
    if _has_secret(uri) or _has_secret(place):  # the address itself is not shown: the secret is in it
        how = "A password is read from PGPASSWORD or ~/.pgpass, S3's keys from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise UsageError(f"{file}: [tracking] wanted addresses without a password, found one with it. {how}")
    if not uri.startswith("postgresql://"):
        what = "an MLflow server" if uri.startswith(("http://", "https://")) else repr(uri.partition(":")[0])
        raise UsageError(f"{file}: uri: wanted postgresql://USER@HOST/DATABASE, found {what}. No other store is shared")
    if not place.startswith("s3://") and not Path(place).is_absolute():
        raise UsageError(f"{file}: artifacts: wanted s3://BUCKET/PREFIX or an absolute path, found {place!r}")
    if place.startswith("s3://") and not place.removeprefix("s3://").partition("/")[0]:
        raise UsageError(f"{file}: artifacts: wanted s3://BUCKET/PREFIX, found no bucket in {place!r}")
    return Shared(uri, place)


def _has_secret(address: str) -> bool:
    from urllib.parse import parse_qs, urlsplit

    try:
        parts = urlsplit(address)
        secret = parts.password is not None or any("password" in key for key in parse_qs(parts.query))
    except ValueError:  # brackets that are no host
        return "@" in address
    return secret or (parts.scheme == "s3" and "@" in parts.netloc)
