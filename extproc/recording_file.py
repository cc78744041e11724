"""Recordings on disk: lines in, lines out, zstd where the name or the content says so."""

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


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a recording, each with its end. Raises OSError, and BadRecording for what is damaged."""
    with path.open("rb") as file:
        compressed = file.read(4) == _ZSTD_MAGIC
        file.seek(0)
        yield from _unpacked(file) if compressed else _lines(file)


def _unpacked(file: BinaryIO) -> Iterator[bytes]:
    # One frame follows another where a recorder was started again.
    with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as reader:
        try:
            yield from _lines(io.BufferedReader(reader, buffer_size=1 << 20))
        except zstandard.ZstdError as fault:
            raise BadRecording(f"not zstd, or damaged: {fault}") from fault


def _lines(file: BinaryIO | io.BufferedReader) -> Iterator[bytes]:
    number = 0
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) >= _LONGEST_LINE and not line.endswith(b"\n"):
            raise BadRecording(f"line {number}: longer than {_LONGEST_LINE} bytes")
        yield line
