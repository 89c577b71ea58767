"""Compressed files, other encodings and Excel sheets as plain text files in UTF-8."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any

from privagrad.data._polars import polars
from privagrad.data.schema import Schema, encoding_named

if TYPE_CHECKING:
    import polars as pl

EXCEL = ".xlsx"
FRAMES = (".parquet", ".arrow", ".ipc", ".feather")
_CHARACTERS = 2**20
_UTF8 = ("utf-8", "utf-8-sig", "ascii")


def files_of(path: Path) -> list[Path]:
    """A file; of a folder its files in the order of their names, which are one table together.

    Names that begin with a dot or an underscore are those of notes about the table.
    """
    if not path.is_dir():
        return [path]
    found = sorted(place for place in path.iterdir() if place.name[0] not in "._")
    if inner := [place.name for place in found if place.is_dir()]:
        raise ValueError(
            f"Expected a folder of files alone, found the folder {inner[0]!r} in {path.name}: "
            "names of folders are no columns here. Put all files into one folder."
        )
    endings = sorted({ending_of(place) for place in found})
    if len(endings) != 1 or endings[0] == EXCEL:
        shown = ", ".join(endings) or "no file"
        raise ValueError(
            f"Expected files of one kind in {path.name} (Parquet, Arrow or text), found {shown}."
        )
    _require_different(found)
    return found


def _require_different(files: list[Path]) -> None:
    """Refuse links to another one of the files, and a file beside what it is packed in.

    A guarantee for one row is none for its copies.
    """
    seen: dict[tuple[int, int], str] = {}
    names: dict[str, str] = {}
    for file in filter(Path.exists, files):
        name = file.stem if file.suffix.lower() == ".gz" else file.name
        packed = names.setdefault(name, file.name)
        if packed != file.name:
            raise ValueError(
                f"Expected each file of {file.parent.name} once, found {packed!r} and "
                f"{file.name!r}, which look like one table with and without gzip: its rows would "
                "count twice. Remove one of them, or rename it if it has other rows."
            )
        about = file.stat()
        other = seen.setdefault((about.st_dev, about.st_ino), file.name)
        if other != file.name:
            raise ValueError(
                f"Expected different files in {file.parent.name}, found {other!r} and "
                f"{file.name!r}, which are one file: its rows would count twice. Remove the link."
            )


def ending_of(path: Path) -> str:
    """What kind of file it is: without .gz, which any text file may have."""
    name = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    return name.suffix.lower()


def is_plain(path: Path, schema: Schema) -> bool:
    """Whether a file is read as it is: neither packed, nor a sheet, nor in another encoding."""
    if ending_of(path) in FRAMES:
        return True
    excel, packed = ending_of(path) == EXCEL, path.suffix.lower() == ".gz"
    return not excel and not packed and encoding_named(schema.encoding) in _UTF8


@contextmanager
def plain_text(path: Path, schema: Schema) -> Iterator[Path]:
    """The rows as a text file in UTF-8 of the same name: the file itself if it is one.

    A copy is private, and deleted in the end.
    """
    excel, packed = ending_of(path) == EXCEL, path.suffix.lower() == ".gz"
    encoding = encoding_named(schema.encoding)
    if is_plain(path, schema):
        yield path
        return
    with TemporaryDirectory(prefix="privagrad-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / path.name
        if excel:
            _write_sheet(path, schema, copy)
        else:
            _write_text(path, packed, encoding, copy)
        yield copy


def _write_text(path: Path, packed: bool, encoding: str, copy: Path) -> None:
    """Decode and write piece by piece."""
    encoding = "utf-8-sig" if encoding in _UTF8 else encoding
    opened: Any = gzip.open if packed else open
    try:
        source: IO[str] = opened(path, "rt", encoding=encoding, newline="")
        with source, copy.open("w", encoding="utf-8", newline="") as target:
            while piece := source.read(_CHARACTERS):
                target.write(piece)
    except UnicodeError:
        raise undecodable(path, encoding) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"Expected a whole gzip file in {path.name}, found one that is cut off or damaged: "
            "copy or download it again. Nothing was spent."
        ) from error


def empty_lines_at_the_end(path: Path) -> int:
    """How many lines without any character a text file ends with."""
    ends = 0
    with path.open("rb") as file:
        place = file.seek(0, os.SEEK_END)
        while place:
            size = min(place, _CHARACTERS)
            place = file.seek(place - size)
            block = file.read(size)
            rest = block.rstrip(b"\r\n")
            ends += block.count(b"\n", len(rest))
            if rest:
                break
    return max(ends - 1, 0)


def undecodable(path: Path, encoding: str) -> ValueError:
    """What to say of bytes that are no text. They are not quoted."""
    return ValueError(
        f"Expected {encoding} text in {path.name}, found other bytes: state its encoding, such as "
        "--encoding latin-1, cp1252 or utf-16, or `encoding` in the schema. Nothing was spent."
    )


def _write_sheet(path: Path, schema: Schema, copy: Path) -> None:
    """One sheet of an Excel file, all cells as texts."""
    pl = polars()
    try:
        import fastexcel
    except ImportError as error:
        raise ImportError(
            "Reading Excel files needs fastexcel: pip install 'privagrad[tables]'."
        ) from error
    try:
        book = fastexcel.read_excel(path)
        name = _sheet(book.sheet_names, schema.sheet, path)
        texts, numbers = (
            pl.DataFrame(book.load_sheet(name, header_row=None, dtypes=kind))
            for kind in ("string", "float")
        )
    except fastexcel.FastExcelError:
        raise ValueError(
            f"Expected an Excel file in {path.name}, found one that cannot be read: save it again "
            "as .xlsx, or as CSV. Nothing was spent."
        ) from None
    cells = [_exact(text, number) for text, number in zip(texts, numbers, strict=True)]
    pl.DataFrame(cells).write_csv(copy, separator=schema.separator, include_header=False)


def _exact(texts: pl.Series, numbers: pl.Series) -> pl.Series:
    """Cells as texts, numbers with all their digits: as texts they come rounded to 9 decimals.

    A text that reads as the number of its cell stays as it is, such as 007.
    """
    read = texts.cast(numbers.dtype, strict=False)
    return texts.zip_with((read == numbers).fill_null(True), numbers.cast(texts.dtype))


def _sheet(names: list[str], wanted: str | None, path: Path) -> str:
    if len(names) == 1 or wanted in names:
        return names[0] if len(names) == 1 else str(wanted)
    shown = ", ".join(map(repr, names[:10]))
    found = "none is named" if wanted is None else f"no sheet {wanted!r}"
    raise ValueError(
        f"Expected the name of one of the {len(names)} sheets of {path.name} ({shown}), found "
        f"{found}: give `sheet` under [file] in the schema, or --sheet to privagrad schema. "
        "Nothing was spent."
    )
