"""Artifacts in a bucket of S3, or of a store that speaks as S3 does (MLFLOW_S3_ENDPOINT_URL names its address).

A folder of the project is the cache: what is written lies there too, and what is read is fetched once. Beside a run's
artifacts a note says which version of each object was fetched (its ETag) and how the file looked then. So an object that
was changed is fetched again, and so is a file that was damaged here. The cache may be deleted at any time.
boto3 finds its keys itself: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from stages.frame.types import MissingInput, TurnwiseError, UsageError
from stages.store.artifacts import DROPPED, SEAL
from stages.store.machine import first_line, whole

NOTE = "fetched.json"  # beside a run's artifacts: name -> [ETag, bytes, time of change] of the file
LOOK_S = 2.0  # a list of a run's objects is good for so long
GONE = ("404", "NoSuchKey", "NotFound")


class Object(NamedTuple):
    version: str  # its ETag
    size_bytes: int


class Bucket:
    """A `Place`. address: s3://BUCKET/PREFIX; root: the cache."""

    def __init__(self, address: str, root: Path) -> None:
        self._address = address
        self.root = root
        self._bucket, _, self._prefix = address.removeprefix("s3://").partition("/")
        self._listed: dict[Path, tuple[float, dict[str, Object]]] = {}  # run's folder -> when, its objects
        self._lock = threading.RLock()  # threads take turns

    @cached_property
    def _client(self) -> Any:
        try:
            import boto3
        except ImportError:
            wanted = "turnwise.toml names a bucket of S3, but boto3 is not installed"
            raise UsageError(f"{wanted}. Run: pip install 'turnwise[team]'") from None
        return boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL") or None)

    def check(self) -> None:
        with self._told():
            self._client.list_objects_v2(Bucket=self._bucket, MaxKeys=1)

    def location(self, experiment: str) -> str:
        return f"{self._address}/{experiment}"

    def address(self, folder: Path, path: str) -> str:
        return f"{self._address}/{'/'.join(folder.parts[-3:])}/{path}"

    def bring(self, folder: Path, path: str = "") -> None:
        with self._lock, self._told():
            try:
                self._bring(folder, path)
            except Exception as error:
                if not _is_gone(error):
                    raise
                self._listed.pop(folder, None)  # it was dropped since
                self._bring(folder, path)

    def send(self, folder: Path, path: str) -> None:
        start = folder / path
        files = [start] if start.is_file() else [file for file in sorted(start.rglob("*")) if file.is_file()]
        with self._lock, self._told():
            self._listed.pop(folder, None)
            note = _note(folder)
            for file in files:
                name = file.relative_to(folder).as_posix()
                self._client.upload_file(str(file), self._bucket, self._key(folder, name))
                kept = self._client.head_object(Bucket=self._bucket, Key=self._key(folder, name))
                note[name] = [kept["ETag"], *_looks(file)]
            _write(folder, note)

    def remove(self, folder: Path, names: Collection[str]) -> None:
        with self._lock, self._told():
            for name in names:
                self._client.delete_object(Bucket=self._bucket, Key=self._key(folder, name))
                (folder / name).unlink(missing_ok=True)
            self._listed.pop(folder, None)

    def weights(self, folder: Path) -> dict[str, int]:
        with self._lock, self._told():
            found = {name: one.size_bytes for name, one in self._objects(folder).items()}
        return {name: size for name, size in sorted(found.items()) if name.endswith(".safetensors")}

    def _bring(self, folder: Path, path: str) -> None:
        objects, note = self._objects(folder), _note(folder)
        below = path.strip("/") if path != "." else ""
        wanted = {
            name
            for name in objects | note
            if not below or name in (below, SEAL, DROPPED) or name.startswith(f"{below}/")
        }
        if DROPPED in objects:  # what it names may be about to be deleted, and is not read
            self._fetch(folder, DROPPED, objects[DROPPED], note)
            wanted -= set(json.loads((folder / DROPPED).read_text(encoding="utf-8")))
        for name in sorted(wanted - objects.keys()):  # deleted there
            del note[name]
            (folder / name).unlink(missing_ok=True)
        for name in sorted(wanted & objects.keys()):
            self._fetch(folder, name, objects[name], note)
        _write(folder, note)

    def _fetch(self, folder: Path, name: str, wanted: Object, note: dict[str, list[Any]]) -> None:
        file = folder / name
        if file.is_file() and note.get(name) == [wanted.version, *_looks(file)]:
            return
        with whole(file) as unfinished:
            part = unfinished.with_name(f"{unfinished.name}{os.getpid()}")  # two processes may fetch it at once
            self._client.download_file(self._bucket, self._key(folder, name), str(part))
            part.replace(unfinished)
        note[name] = [wanted.version, *_looks(file)]

    def _objects(self, folder: Path) -> dict[str, Object]:
        """The run's objects, by name."""
        when, found = self._listed.get(folder, (-LOOK_S, {}))
        if time.monotonic() < when + LOOK_S:
            return found
        start = self._key(folder, "")
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=start)
        objects = [one for page in pages for one in page.get("Contents", ())]
        named = {one["Key"].removeprefix(start): Object(one["ETag"], one["Size"]) for one in objects}
        # Consoles put objects there that stand for folders. A name with ".." would leave the run's folder.
        found = {name: one for name, one in named.items() if name[-1:] not in ("", "/") and ".." not in name.split("/")}
        self._listed[folder] = time.monotonic(), found
        return found

    def _key(self, folder: Path, name: str) -> str:
        return "/".join([*([self._prefix] if self._prefix else []), *folder.parts[-3:], name])

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn what S3 says into a sentence. Its errors are known by their module, which need not be imported."""
        try:
            yield
        except TurnwiseError:
            raise
        except Exception as error:
            if not type(error).__module__.startswith(("botocore.", "boto3.", "s3transfer.")):
                raise
            if _is_gone(error):
                raise MissingInput(
                    f"an artifact in {self._address} was deleted while it was read. Run the same command again"
                ) from error
            raise TurnwiseError(
                f"the artifacts in {self._address} were wanted, but: {first_line(error, 200)}. Look at the address "
                "(MLFLOW_S3_ENDPOINT_URL) and the keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), then run the same command again"
            ) from error


def _is_gone(error: Exception) -> bool:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", "")) in GONE


def _looks(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _note(folder: Path) -> dict[str, list[Any]]:
    """Empty where there is none that can be read: all is fetched again."""
    try:
        found: dict[str, list[Any]] = json.loads((folder.parent / NOTE).read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def _write(folder: Path, note: dict[str, list[Any]]) -> None:
    if note != _note(folder):
        with whole(folder.parent / NOTE) as file:
            file.write_text(json.dumps(note), encoding="utf-8")
