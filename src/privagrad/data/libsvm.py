"""LIBSVM files: lines of `label index:value ...`, indices from 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from privagrad._internal.validate import Vector

ENDINGS = (".libsvm", ".svm", ".svmlight", ".t", "")


def is_libsvm(path: Path) -> bool:
    return path.suffix.lower() in ENDINGS


def read_libsvm(path: Path, columns: int | None = None) -> tuple[Any, Vector]:
    """A CSR matrix and the labels.

    Without `columns` the largest index says how many there are; with it, larger ones are left out,
    as in rows that a model of so many columns has to predict.
    """
    from scipy.sparse import csr_array

    labels: list[float] = []
    values: list[float] = []
    indices: list[int] = []
    starts = [0]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        lines = ["(bytes that are no UTF-8 text)"]
    for number, line in enumerate(lines, start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        try:
            labels.append(float(fields[0]))
            for field in fields[1:]:
                index, _, value = field.partition(":")
                if columns is None or int(index) <= columns:
                    indices.append(int(index) - 1)
                    values.append(float(value))
        except ValueError as error:
            raise ValueError(
                f"Expected 'label index:value ...' in line {number} of {path.name}, "
                f"found {line[:60]!r}."
            ) from error
        starts.append(len(indices))
    if not labels or min(indices, default=0) < 0:
        raise ValueError(
            f"Expected rows with indices from 1 in {path.name}, found none or an index 0."
        )
    dim = max(indices, default=0) + 1 if columns is None else columns
    if dim > 2**31 - 1:
        raise ValueError(f"Expected indices below 2^31 in {path.name}, found {dim}.")
    X = csr_array((np.array(values), np.array(indices), np.array(starts)), shape=(len(labels), dim))
    return X, np.array(labels)
