"""Recordings on disk: lines in, lines out, zstd where the content says so."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from predictor.recording import BadRecording

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# No record is longer: 4M tokens in base64 take 22 MB.
_LONGEST_LINE = 64 << 20
_BUFFER_BYTES = 1 << 20
# What comes out of a piece at once is memory; a repeated byte packs 30,000 to one.
_PACKED_PIECE_BYTES = 1 << 10


class RecordingLines:
    """The lines of a recording, each with its end, to be gone through once.

    Raises OSError, and BadRecording for what is damaged. One that was cut off is read to there: a recorder that was
    killed leaves such a file. `cut_off` then says how it ends; `lines` and `read_bytes` are what has been read so far,
    unpacked.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0
        self.read_bytes = 0
        self.cut_off: str | None = None

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            compressed = file.read(4) == _ZSTD_MAGIC
            file.seek(0)
            if not compressed:
                yield from self._lines(file)
                return
            unpacked = _Unpacked(file)
            yield from self._lines(io.BufferedReader(unpacked, _BUFFER_BYTES))
            if unpacked.in_frame:
                self.cut_off = "the end of what is compressed is missing"

    def _lines(self, file: BinaryIO | io.BufferedReader) -> Iterator[bytes]:
        while line := file.readline(_LONGEST_LINE):
            if not line.endswith(b"\n"):
                if len(line) >= _LONGEST_LINE:
                    raise BadRecording(f"line {self.lines + 1}: longer than {_LONGEST_LINE} bytes")
                self.cut_off = f"line {self.lines + 1} has no end"
            self.lines += 1
            self.read_bytes += len(line)
            yield line


class _Unpacked(io.RawIOBase):
    """What a file of zstd frames holds: one follows another where a recorder was started again. `in_frame`: more of
    the last one is expected, so that at the end of the file some is missing."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frames = zstandard.ZstdDecompressor()
        self._frame = self._frames.decompressobj()
        self._packed = b""
        self._ready = memoryview(b"")
        self.in_frame = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]  # any writable buffer
        while not self._ready:
            packed = self._packed or self._file.read(_PACKED_PIECE_BYTES)
            if not packed:
                return 0
            self._packed, self.in_frame = b"", True
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except zstandard.ZstdError as fault:
                raise BadRecording(f"not zstd, or damaged: {fault}") from fault
            if self._frame.eof:
                self._packed, self.in_frame = self._frame.unused_data, False
                self._frame = self._frames.decompressobj()
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def read_lines(path: Path) -> Iterator[bytes]:
    """As `RecordingLines` has them."""
    return iter(RecordingLines(path))
