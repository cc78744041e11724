"""What was learned, kept on disk between runs: a file for each worker and each pool, written beside the event loop.

A file is replaced whole or not at all. One that cannot be read, or is of another form, is counted and left out: then
learning begins from nothing, as without a store.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from predictor.fleet import Fleet
from predictor.memory import VERSION, PoolMemory, WorkerMemory

_Memory = TypeVar("_Memory", WorkerMemory, PoolMemory)
# No memory is larger: 128 strata of 64 samples.
_MOST_BYTES = 16 << 20


class LearnedStore:
    """`count` is told what became of each file: loaded, corrupt, stale (of another engine), saved or failed."""

    def __init__(self, folder: Path, fleet: Fleet, count: Callable[[str], None]) -> None:
        self._folder = folder
        self._fleet = fleet
        self._count = count
        self._workers: dict[str, WorkerMemory] = {}
        self._saved: dict[str, bytes] = {}  # by file name: a digest of what is there

    def recall_pool(self, pool: str) -> None:
        """What its requests have generated before. Reads a file: call it before requests come."""
        memory = self._read("pool", pool, PoolMemory)
        if memory is not None and memory.pool == pool:
            self._fleet.recall_pool(memory)
            self._count("loaded")

    def worker_joined(self, worker: str) -> None:
        """Reads what is kept of it, and recalls it if it is the same engine as far as is known."""
        memory = self._read("worker", worker, WorkerMemory)
        if memory is not None and memory.worker == worker:
            self._workers[worker] = memory
            self.settings_known(worker)

    def settings_known(self, worker: str) -> None:
        """The engine has told its settings: now it may be the one that was remembered, or not be it any more."""
        memory = self._workers.get(worker)
        if memory is None:
            return
        try:
            recalled = self._fleet.recall_worker(memory)
        except ValueError:
            del self._workers[worker]
            self._count("corrupt")
            return
        self._count("loaded" if recalled else "stale")

    async def save(self, pools: Iterable[str]) -> None:
        """Writes what has changed. A turn of the event loop makes one memory; a thread encodes and writes it."""
        for pool in pools:
            await self._write("pool", pool, partial(_itself, self._fleet.pool_memory(pool)))
            for spec in self._fleet.workers(pool):
                try:
                    make = self._fleet.worker_memory(spec.name)
                except KeyError:  # it has left meanwhile
                    continue
                if make is not None:
                    await self._write("worker", spec.name, make)

    def _read(self, kind: str, name: str, form: type[_Memory]) -> _Memory | None:
        path = self._path(kind, name)
        try:
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError:
            self._count("failed")
            return None
        try:
            memory = msgspec.json.decode(raw, type=form)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._count("corrupt")
            return None
        if memory.version != VERSION:
            self._count("stale")
            return None
        return memory

    async def _write(self, kind: str, name: str, make: Callable[[], WorkerMemory | PoolMemory]) -> None:
        path = self._path(kind, name)
        try:
            saved = await asyncio.to_thread(_replace, path, make, self._saved.get(path.name))
        except (OSError, msgspec.MsgspecError, ValueError):
            self._count("failed")
            return
        if saved is not None:
            self._saved[path.name] = saved
            self._count("saved")

    def _path(self, kind: str, name: str) -> Path:
        """Readable, and apart for names that differ only in what a file name cannot hold."""
        readable = re.sub(r"[^A-Za-z0-9.-]", "_", name)[:40]
        return self._folder / f"{kind}-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:12]}.json"


def _itself(memory: PoolMemory) -> PoolMemory:
    return memory


def _replace(path: Path, make: Callable[[], WorkerMemory | PoolMemory], known: bytes | None) -> bytes | None:
    """Writes a file so that whoever reads it finds the old one or the new one; None if it is there already."""
    raw = msgspec.json.encode(make())
    digest = hashlib.sha256(raw).digest()
    if digest == known:
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}.new")
    try:
        with fresh.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return digest
