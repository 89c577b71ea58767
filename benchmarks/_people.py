"""Generated tables of people, as messy as real ones: loans of a bank, stays in a hospital.

Amounts are skewed, units are mixed, columns are correlated, some categories are rare, and blanks
tell something: a laboratory value that nobody asked for belongs to a healthier patient.
The truth is not linear. Every table comes with the schema that its codebook would give.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import expit

from privagrad.data.schema import Column, Schema

_DAY = np.timedelta64(1, "D")

WARDS = ("Innere Medizin", "Chirurgie", "Orthopädie", "Neurologie", "Gynäkologie", "Urologie",
         "HNO", "Palliativstation", "Tropenmedizin")  # fmt: skip
DIAGNOSES = ("I50", "I10", "I21", "I48", "J18", "J44", "N18", "E11", "K80", "K35", "S72", "S06",
             "M16", "M54", "G40", "I63", "C34", "C50", "O80", "N20", "A41", "F10", "J35",
             "B54")  # fmt: skip
ROUTES = ("Notfall", "Einweisung", "Verlegung", "Geburt")
INSURANCES = ("gesetzlich", "privat", "Berufsgenossenschaft", "Selbstzahler")

JOBS = ("clerk", "worker", "skilled worker", "manager", "civil servant", "self-employed", "student",
        "retired", "without work", "soldier", "clergy")  # fmt: skip
PURPOSES = ("car", "furniture", "debts", "renovation", "education", "wedding", "boat")
_ADULT = ["age", "workclass", "fnlwgt", "education", "education_num", "marital_status",
          "occupation", "relationship", "race", "sex", "capital_gain", "capital_loss",
          "hours_per_week", "native_country", "income"]  # fmt: skip
HOMES = ("rented", "owned", "with parents", "other")


@dataclass(frozen=True)
class People:
    """A table with its target, and what its codebook says."""

    frame: pd.DataFrame
    schema: Schema

    def split(self, train: int) -> tuple[People, People]:
        """The first rows, and all others."""
        first, rest = self.frame.iloc[:train], self.frame.iloc[train:]
        return replace(self, frame=first), replace(self, frame=rest)

    def write(self, path: Path) -> Path:
        """As the schema says that the file is written; a blank is the last of its blanks."""
        how = self.schema
        self.frame.to_csv(
            path, sep=how.separator, index=False, decimal=how.decimal, encoding=how.encoding,
            na_rep=how.blanks[-1], float_format="%.10g", header=how.header,
        )  # fmt: skip
        return path


def hospital(n: int, seed: int) -> People:
    """Stays in a hospital: is the patient back within 30 days?"""
    rng = np.random.default_rng(seed)
    frailty = rng.normal(size=n)
    age = np.clip(np.round(58 + 18 * (0.6 * frailty + 0.8 * rng.normal(size=n))), 0, 104)
    sex = rng.choice(["m", "w", "d"], n, p=[0.47, 0.525, 0.005])
    diagnosis = _ranked(rng, DIAGNOSES, frailty + 0.7 * rng.normal(size=n), steepness=1.4)
    ward = _ranked(rng, WARDS, rng.normal(size=n), steepness=1.7)
    ward = np.where(np.isin(diagnosis, ("I50", "I21", "I48", "J18", "N18")), WARDS[0], ward)
    route = rng.choice(ROUTES, n, p=[0.46, 0.47, 0.06, 0.01])
    insurance = rng.choice(INSURANCES, n, p=[0.86, 0.115, 0.02, 0.005])
    days = np.ceil(rng.lognormal(1.3 + 0.35 * frailty, 0.7))
    stays = rng.poisson(np.exp(-0.4 + 0.6 * frailty))
    kidney = rng.lognormal(0.0 + 0.18 * frailty + 0.8 * (diagnosis == "N18"), 0.25)
    blood = np.round(13.6 - 0.9 * frailty - 0.8 * (sex == "w") + rng.normal(0, 1.2, n), 1)
    pressure = np.round(128 + 0.25 * (age - 58) + rng.normal(0, 17, n))
    weight = np.round(rng.normal(np.where(sex == "m", 84, 71), 14), 1)
    troponin = rng.lognormal(2.2 + 0.4 * frailty + 2.2 * (diagnosis == "I21"), 0.8)
    cost = np.round(rng.lognormal(7.4 + 0.5 * np.log(days), 0.5), 2)
    admitted = np.datetime64("2021-01-01") + rng.integers(0, 1095, n) * _DAY
    # A blood test that nobody asked for says more than most of its results.
    asked = {
        "creatinine": rng.random(n) < expit(1.4 + 0.9 * frailty),
        "troponin": rng.random(n) < expit(-1.2 + 0.8 * frailty + 2 * (diagnosis == "I21")),
        "weight": rng.random(n) < 0.93,
    }
    emergency, tested = route == "Notfall", asked["troponin"]
    odds = (
        -3.15 + 0.55 * frailty + 0.5 * np.minimum(stays, 5) + 0.45 * emergency
        + 0.35 * np.log(kidney) * asked["creatinine"] - 0.12 * (blood - 13)
        + 0.5 * tested + 0.02 * np.maximum(age - 70, 0) + 0.35 * (days < 2)
        + 0.7 * np.isin(diagnosis, ("I50", "J44")) - 0.8 * np.isin(diagnosis, ("K35", "O80"))
        + 0.25 * np.isin(admitted.astype("datetime64[M]").astype(int) % 12, (0, 1, 11))
        + 0.6 * (ward == "Palliativstation") + 0.3 * emergency * (age > 80)
    )  # fmt: skip
    frame = pd.DataFrame({
        "case_id": 100_000 + rng.permutation(n),
        "admitted": pd.Series(admitted).dt.strftime("%d.%m.%Y"),
        "age": age.astype(int),
        "sex": sex,
        "ward": ward,
        "diagnosis": diagnosis,
        "route": route,
        "insurance": insurance,
        "days": days.astype(int),
        "earlier_stays": stays,
        "creatinine": np.where(asked["creatinine"], np.round(kidney, 2), np.nan),
        "hemoglobin": blood,
        "pressure": pressure.astype(int),
        "weight": np.where(asked["weight"], weight, np.nan),
        "troponin": np.where(asked["troponin"], np.round(troponin, 1), np.nan),
        "cost": cost,
        "readmitted": (rng.random(n) < expit(odds)).astype(int),
    })  # fmt: skip
    bounds = {"age": (0, 110), "days": (1, 365), "hemoglobin": (3, 25),
              "pressure": (50, 260), "weight": (1, 250)}  # fmt: skip
    return People(frame, Schema(
        (
            Column("case_id", "ignore"),
            Column("admitted", "date", *_days("2021-01-01", "2023-12-31"), missing=False),
            *(_number(name, bounds, ("age", "days", "earlier_stays", "hemoglobin",
                                     "pressure", "cost"))
              if name not in _HOSPITAL else _category(name, _HOSPITAL[name])
              for name in frame.columns[2:]),
        ),
        target="readmitted", separator=";", blanks=("", "NA"), encoding="latin-1", decimal=",",
    ))  # fmt: skip


_HOSPITAL = {
    "sex": ("m", "w", "d"), "ward": WARDS, "diagnosis": DIAGNOSES, "route": ROUTES,
    "insurance": INSURANCES, "readmitted": ("0", "1"),
}  # fmt: skip


def credit(n: int, seed: int) -> People:
    """Loans of a bank: does the customer default?"""
    rng = np.random.default_rng(seed)
    wealth = rng.normal(size=n)
    age = np.clip(np.round(rng.gamma(9, 4.6, n) + 18 - 14), 18, 85)
    job = _ranked(rng, JOBS, -wealth + rng.normal(size=n), steepness=1.5)
    income = rng.lognormal(10.3 + 0.45 * wealth - 0.6 * (job == "student"), 0.35)
    savings = np.where(rng.random(n) < expit(0.9 * wealth), rng.lognormal(8 + wealth, 1.3), 0.0)
    purpose = _ranked(rng, PURPOSES, rng.normal(size=n), steepness=1.5)
    home = rng.choice(HOMES, n, p=[0.55, 0.33, 0.1, 0.02])
    months = rng.choice([6, 12, 18, 24, 36, 48, 60, 84], n)
    amount = np.round(rng.lognormal(8.3 + 0.25 * wealth + 0.012 * months, 0.7), -1)
    late = rng.poisson(np.exp(-0.9 - 0.6 * wealth))
    since = np.where(late > 0, np.ceil(rng.exponential(500, n)), np.nan)
    score = np.where(
        rng.random(n) < 0.8, np.round(600 + 70 * wealth + rng.normal(0, 50, n)), np.nan
    )
    told = rng.random(n) < expit(2.2 + 0.7 * wealth)  # who earns little leaves it blank
    opened = np.datetime64("2005-01-01") + (rng.beta(2, 1.2, n) * 7300).astype(int) * _DAY
    odds = (
        -1.6 - 0.55 * wealth + 0.5 * np.log(amount / 5000) + 0.35 * np.minimum(late, 4)
        + 0.6 * np.exp(-np.nan_to_num(since, nan=1e6) / 200) + 0.4 * ~told
        - 0.25 * np.log1p(savings / 1000) + 0.5 * np.isin(job, ("student", "without work"))
        + 0.35 * (purpose == "debts") - 0.3 * (home == "owned") + 0.3 * np.isnan(score)
        + 0.8 * (amount * 12 / months > 0.3 * income) - 0.01 * (age - 40)
        - 0.2 * (np.datetime64("2025-01-01") - opened) / (_DAY * 3650)
    )  # fmt: skip
    frame = pd.DataFrame({
        "loan_id": [f"L{number:07d}" for number in rng.permutation(n)],
        "customer_since": opened.astype(str),
        "age": age.astype(int),
        "job": job,
        "income": np.where(told, np.round(income, -2), np.nan),
        "savings": np.round(savings, 2),
        "purpose": purpose,
        "home": home,
        "months": months,
        "amount": amount.astype(int),
        "late_payments": late,
        "days_since_late": since,
        "score": score,
        "branch_code": rng.choice([f"B{number:02d}" for number in range(1, 41)], n, p=_zipf(40)),
        "default": np.where(rng.random(n) < expit(odds), "yes", "no"),
    })  # fmt: skip
    categories = {"job": JOBS, "purpose": PURPOSES, "home": HOMES, "default": ("no", "yes"),
                  "branch_code": tuple(f"B{number:02d}" for number in range(1, 41))}  # fmt: skip
    bounds = {"age": (18, 100), "months": (1, 120), "score": (300, 850)}
    whole = ("age", "savings", "months", "amount", "late_payments")
    return People(frame, Schema(
        (
            Column("loan_id", "ignore"),
            Column("customer_since", "date", *_days("2000-01-01", "2025-01-01"), missing=False),
            *(_number(name, bounds, whole) if name not in categories
              else _category(name, categories[name]) for name in frame.columns[2:]),
        ),
        target="default",
    ))  # fmt: skip


def adult(folder: Path) -> tuple[People, People]:
    """The census table, with the categories of its codebook; "?" is blank."""
    train, test = (
        pd.read_csv(folder / name, names=_ADULT, skipinitialspace=True, na_values="?")
        for name in ("adult.data", "adult-test.csv")
    )
    test["income"] = test["income"].str.rstrip(".")
    bounds = {"age": (17, 90), "hours_per_week": (1, 99)}
    columns = [
        _category(name, tuple(sorted(pd.concat([train[name], test[name]]).dropna().unique())))
        if train[name].dtype.kind == "O" or pd.api.types.is_string_dtype(train[name])
        else Column(name, "ignore") if name == "fnlwgt" else _number(name, bounds, _ADULT)
        for name in _ADULT
    ]  # fmt: skip
    schema = Schema(tuple(columns), target="income")
    return People(train, schema), People(test, schema)


def _number(name: str, bounds: Mapping[str, tuple[float, float]], never_blank: Any) -> Column:
    low, high = bounds.get(name, (None, None))
    missing = False if name in never_blank else None
    return Column(name, "number", low, high, missing)


def _category(name: str, categories: tuple[str, ...]) -> Column:
    return Column(name, "category", categories=categories)


def _days(low: str, high: str) -> tuple[float, float]:
    first, last = (
        float(np.datetime64(day).astype("datetime64[D]").astype(int)) for day in (low, high)
    )
    return first, last


def _zipf(count: int, steepness: float = 1.0) -> Any:
    weights = 1 / (np.arange(count) + 1.5) ** steepness
    return weights / weights.sum()


def _ranked(rng: np.random.Generator, names: tuple[str, ...], lean: Any, steepness: float) -> Any:
    """Names with falling frequencies; those that come first are more frequent where `lean` is."""
    chances = np.cumsum(_zipf(len(names), steepness))
    order = np.argsort(np.argsort(-lean + 0.8 * rng.normal(size=len(lean)))) / len(lean)
    return np.asarray(names, dtype=object)[
        np.minimum(np.searchsorted(chances, order), len(names) - 1)
    ]


def write_session(folder: Path) -> None:
    """The files of docs/tutorials/hospital.md: blanks are NA in some columns, empty in others."""
    table = hospital(25_000, seed=2024)
    frame = table.frame.assign(weight=table.frame["weight"].map("{:.1f}".format).replace("nan", ""))
    frame["weight"] = frame["weight"].str.replace(".", ",")
    for name, part in zip(
        ("stays.csv", "held-out.csv"), People(frame, table.schema).split(20_000), strict=True
    ):
        part.write(folder / name)
    renamed = frame.iloc[20_000:].rename(columns={"pressure": "systolic", "cost": "charges"})
    People(renamed, table.schema).write(folder / "other-clinic.csv")


if __name__ == "__main__":
    write_session(Path(sys.argv[1]))
