"""Tables on disk: CSV, Parquet and LIBSVM files as rows of numbers and a target."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from privagrad._validate import Vector
from privagrad.tables import as_rows

LIBSVM_ENDINGS = (".libsvm", ".svm", ".svmlight", "")


class Table(NamedTuple):
    """`X` is an array or a CSR matrix, `names` its columns."""

    X: Any
    y: Vector
    names: list[str]


def read_table(path: Path, target: str | None = None) -> Table:
    """Read a file by its ending: .csv, .tsv, .parquet; LIBSVM otherwise, which names no target."""
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file, found nothing at {path}.")
    ending = path.suffix.lower()
    if ending in (".csv", ".tsv", ".parquet"):
        return _read_frame(path, ending, target)
    if target is not None and ending not in LIBSVM_ENDINGS:
        raise ValueError(
            f"Expected a .csv, .tsv, .parquet or LIBSVM file, found {path.name}. Convert it first."
        )
    return _read_libsvm(path)


def _read_frame(path: Path, ending: str, target: str | None) -> Table:
    try:
        import polars as pl
    except ImportError as error:
        raise ImportError(
            "Reading CSV and Parquet files needs Polars: pip install 'privagrad[tables]'."
        ) from error
    if ending == ".parquet":
        frame = pl.read_parquet(path)
    else:
        frame = pl.read_csv(
            path, separator="\t" if ending == ".tsv" else ",", infer_schema_length=None
        )
    if target not in frame.columns:
        near = difflib.get_close_matches(str(target), frame.columns, n=1)
        hint = (
            f" Did you mean {near[0]!r}?" if near else f" Columns: {', '.join(frame.columns[:12])}."
        )
        raise ValueError(f"Expected the target among the columns, found {target!r}.{hint}")
    features = frame.drop(target)
    column = frame[target].to_numpy()
    if column.dtype.kind not in "biuf":
        raise TypeError(
            f"Expected a numeric target, found {target!r} of type {column.dtype}. Encode it first."
        )
    return Table(as_rows(features).array, column.astype(np.float64), features.columns)  # type: ignore[union-attr]


def _read_libsvm(path: Path) -> Table:
    """Lines of `label index:value ...`, indices from 1."""
    from scipy.sparse import csr_array

    labels: list[float] = []
    values: list[float] = []
    columns: list[int] = []
    starts = [0]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        try:
            labels.append(float(fields[0]))
            for field in fields[1:]:
                index, _, value = field.partition(":")
                columns.append(int(index) - 1)
                values.append(float(value))
        except ValueError as error:
            raise ValueError(
                f"Expected 'label index:value ...' in line {number} of {path.name}, "
                f"found {line[:60]!r}."
            ) from error
        starts.append(len(columns))
    if not labels or min(columns, default=0) < 0:
        raise ValueError(
            f"Expected rows with indices from 1 in {path.name}, found none or an index 0."
        )
    dim = max(columns, default=0) + 1
    X = csr_array((np.array(values), np.array(columns), np.array(starts)), shape=(len(labels), dim))
    return Table(X, np.array(labels), [str(j + 1) for j in range(dim)])
