"""What a guarantee for users costs: accuracy on a table with 1 to 50 rows a user.

Users have a mean of their own in every column and an offset of their own in the label; rows vary
around both. Rows of a user are alike, and many more for some users than for others. Accuracy is
that on new users, each counting once.
"""

from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path

import numpy as np

import privagrad as pg
from benchmarks._rows import Row, write_csv
from privagrad._internal.validate import Integers, Vector

COLUMNS, MOST = 15, 50
EPSILONS = (0.5, 1.0, 4.0)
METRIC = "accuracy on users"


def table(users: int, seed: int) -> tuple[Vector, Integers, Integers]:
    """Rows, labels and the user of each row."""
    rng = np.random.default_rng(seed)
    weights = np.random.default_rng(0).standard_normal(COLUMNS)
    counts = np.exp(rng.uniform(0, math.log(MOST + 1), users)).astype(int)
    owners = np.repeat(np.arange(users), counts)
    own, offset = rng.standard_normal((users, COLUMNS)), rng.standard_normal(users)
    X = 0.6 * own[owners] + 0.8 * rng.standard_normal((owners.size, COLUMNS))
    margins = X @ weights + offset[owners] + rng.logistic(size=owners.size)
    return X, (margins > 0).astype(int), owners


def accuracy(model: pg.PrivateLogisticRegression, seed: int) -> float:
    """The mean over new users of the share of a user's rows that are predicted right."""
    X, y, owners = table(5000, 1000 + seed)
    right = np.bincount(owners, model.predict(X) == y) / np.bincount(owners)
    return float(right.mean())


def contestants(epsilon: float | None, users: int, seed: int) -> dict[str, float]:
    X, y, owners = table(users, seed)
    fit = pg.PrivateLogisticRegression(epsilon or math.inf, classes=[0, 1], delta=1e-6)
    if epsilon is None:
        return {"without privacy": accuracy(fit.fit(X, y, groups=owners), seed)}
    shuffled = np.random.default_rng(seed).permutation(owners.size)
    one = shuffled[np.unique(owners[shuffled], return_index=True)[1]]
    return {
        "rows (weaker)": accuracy(fit.fit(X, y), seed),
        "users, all rows": accuracy(fit.fit(X, y, groups=owners), seed),
        "users, one row": accuracy(fit.fit(X[one], y[one], groups=owners[one]), seed),
    }


def run(arguments: list[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser("python -m benchmarks users")
    parser.add_argument("--users", type=int, nargs="+", default=[500, 5000])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", UserWarning)
    rows: list[Row] = []
    for users in options.users:
        for epsilon in (*EPSILONS, None):
            found = [contestants(epsilon, users, seed) for seed in range(options.seeds)]
            for name in found[0]:
                values = [one[name] for one in found]
                rows.append(Row(f"{users} users", epsilon, name, METRIC, values))
                print(rows[-1])
    if options.csv is not None:
        write_csv(rows, options.csv)
    return {"rows": [row.record() for row in rows]}
