"""diffprivlib's fits, in the interpreter that has it: `ask` here, `main` there."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

Setting = tuple[float, str, float]
"""Epsilon, the form of the columns, C."""


def ask(
    python: str, settings: list[Setting], tables: dict[str, np.ndarray], y: np.ndarray, seed: int
) -> list[list[float]]:
    """[intercept, coefficients...] for each setting, fitted to the table of its form."""
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request.npz")
        arrays: dict[str, Any] = {"settings": json.dumps(settings), "seed": seed, "y": y, **tables}
        np.savez(request, **arrays)
        done = subprocess.run([python, __file__, str(request)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    answer: list[list[float]] = json.loads(done.stdout)
    return answer


def main(request: Any) -> None:
    import diffprivlib
    import sklearn

    if _version(diffprivlib) < (0, 6, 6) and _version(sklearn) >= (1, 4):
        sys.exit(
            f"diffprivlib {diffprivlib.__version__} with scikit-learn {sklearn.__version__} adds n "
            "times the noise it means to (IBM/differential-privacy-library, pull request 98): "
            "install diffprivlib 0.6.6 or newer."
        )
    warnings.simplefilter("ignore")
    settings, seed, y = json.loads(str(request["settings"])), int(request["seed"]), request["y"]
    tables = {form: request[form] for form in {form for _, form, _ in settings}}
    print(json.dumps([fitted(tables[form], y, eps, C, seed) for eps, form, C in settings]))


def fitted(X: np.ndarray, y: np.ndarray, epsilon: float, C: float, seed: int) -> list[float]:
    """Norm and bounds are those of the table itself: what no user may know."""
    from diffprivlib.models import LinearRegression, LogisticRegression

    if np.unique(y).size == 2:
        norm = float(np.linalg.norm(X, axis=1).max())
        model = LogisticRegression(
            epsilon=epsilon, data_norm=norm, C=C, max_iter=1000, random_state=seed
        )
    else:
        model = LinearRegression(
            epsilon=epsilon, bounds_X=(X.min(axis=0), X.max(axis=0)),
            bounds_y=(y.min(), y.max()), random_state=seed,
        )  # fmt: skip
    model.fit(X, y)
    return [float(value) for value in (*np.ravel(model.intercept_), *np.ravel(model.coef_))]


def _version(module: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in module.__version__.split(".")[:3])


if __name__ == "__main__":
    main(np.load(sys.argv[1]))
