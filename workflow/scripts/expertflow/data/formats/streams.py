"""Open a file as a stream of UTF-8 bytes, unpacked and recoded in flat memory."""

import codecs
import io
import zlib
from pathlib import Path
from typing import Any

from expertflow.core.errors import DataError
from expertflow.data.records import Compression

BUFFER_BYTES = 1 << 20
# So little at once, because 4 KiB of zstd data may unpack to 128 MiB.
_PACKED_BYTES = 1 << 12
BOM = b"\xef\xbb\xbf"
BOM_NOTE = "starts with a byte order mark"
SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


def compression_of(head: bytes) -> Compression | None:
    """Recognise packed data by its first bytes."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may begin with a frame that is to be skipped.
    skippable = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    return "zstd" if skippable or head.startswith(b"\x28\xb5\x2f\xfd") else None


def open_bytes(path: Path, compression: Compression | None) -> io.BufferedReader:
    """Open a file, unpacked.

    Raises:
        DataError: it cannot be opened; or, while reading, the packed data are cut off or damaged.
    """
    try:
        if compression is None:
            return io.BufferedReader(path.open("rb", buffering=0), BUFFER_BYTES)
        return io.BufferedReader(_Unpacked(path, compression), BUFFER_BYTES)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); put it back or change its permissions"
        ) from error


def open_utf8(path: Path, compression: Compression | None, encoding: str) -> io.BufferedReader:
    """Open a file as UTF-8 without its byte order mark; bytes that are not decodable stay."""
    stream = open_bytes(path, compression)
    if encoding != "utf-8":
        return io.BufferedReader(_Recoded(stream, path, encoding), BUFFER_BYTES)
    if stream.peek(3).startswith(BOM):
        stream.read(3)
    return stream


def recoded(line: bytes, encoding: str) -> bytes:
    """Turn a line into UTF-8; bytes that are not decodable stay, so that UTF-8 finds them."""
    try:
        return line.decode(encoding, "surrogateescape").encode("utf-8", "surrogateescape")
    except UnicodeError:
        return b"\xff" + line


class _Output(io.RawIOBase):
    """A raw stream over pieces that ``_next`` makes; an empty piece is the end."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._ready:
            self._ready = memoryview(self._next())
        n_bytes = min(len(buffer), len(self._ready))
        buffer[:n_bytes] = self._ready[:n_bytes]
        self._ready = self._ready[n_bytes:]
        return n_bytes

    def _next(self) -> bytes:
        raise NotImplementedError


class _Recoded(_Output):
    def __init__(self, stream: io.BufferedReader, path: Path, encoding: str) -> None:
        super().__init__()
        self._stream = stream
        self._path = path
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _next(self) -> bytes:
        while chunk := self._stream.read1(BUFFER_BYTES):
            if text := self._decode(chunk):
                return text
        return self._decode(b"", final=True)

    def _decode(self, chunk: bytes, *, final: bool = False) -> bytes:
        try:
            return self._decoder.decode(chunk, final).encode("utf-8", "surrogateescape")
        except UnicodeError as error:
            raise DataError(f"{self._path}: {error}; correct options.encoding") from error


class _Unpacked(_Output):
    """Unpack frame after frame; counts lines, so that a fault's place can be told."""

    def __init__(self, path: Path, compression: Compression) -> None:
        super().__init__()
        self._path = path
        self._compression = compression
        self._file = path.open("rb", buffering=BUFFER_BYTES)
        self._packed = b""
        self._engine: Any = None
        self._n_lines = 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def _next(self) -> bytes:
        while True:
            if not self._packed:
                self._packed = self._file.read(_PACKED_BYTES)
            if not self._packed:
                if self._engine is not None:
                    raise DataError(
                        f"{self._path}: ends early after line {self._n_lines}; the download is"
                        " incomplete, fetch it again"
                    )
                return b""
            if self._engine is None and not self._start_frame():
                continue
            if data := self._unpack():
                self._n_lines += data.count(b"\n")
                return data

    def _start_frame(self) -> bool:
        """Begin a frame, unless only padding is left."""
        if self._compression == "gzip" and not self._packed.strip(b"\0"):
            self._packed = b""
            return False
        while len(self._packed) < 4 and (more := self._file.read(_PACKED_BYTES)):
            self._packed += more
        if compression_of(self._packed) != self._compression:
            raise self._damaged("something else follows the packed data")
        if self._compression == "gzip":
            self._engine = zlib.decompressobj(wbits=31)
        else:
            import zstandard

            self._engine = zstandard.ZstdDecompressor().decompressobj()
        return True

    def _unpack(self) -> bytes:
        packed, self._packed = self._packed, b""
        try:
            data: bytes = self._engine.decompress(packed)
        except (zlib.error, _zstd_error(self._compression)) as error:
            raise self._damaged(str(error)) from error
        if self._engine.eof:
            self._packed, self._engine = self._engine.unused_data, None
        return data

    def _damaged(self, why: str) -> DataError:
        fix = "compress it again without --long" if "too much memory" in why else "fetch it again"
        kind = self._compression
        return DataError(
            f"{self._path}: the {kind} data are damaged after line {self._n_lines} ({why}); {fix}"
        )


def _zstd_error(compression: Compression) -> type[Exception]:
    if compression == "gzip":
        return zlib.error
    import zstandard

    error: type[Exception] = zstandard.ZstdError
    return error
