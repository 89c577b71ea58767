"""What the entries of a model file are: so that whatever reads a model need not ask again."""

from __future__ import annotations

from typing import Any

from privagrad.privacy.report_codec import report_from_json

_TEXT, _NUMBER, _WHOLE, _FLAG, _NOTHING = "text", "number", "whole number", "flag", "null"
_TEXTS, _NUMBERS, _MATRIX = "list of texts", "list of numbers", "list of lists of numbers"

_REQUIRED = ("at", "version", "table", "rows", "method", "steps", "batch_size", "dataset", "run")
_MADE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("at", "version", "table", "method", "input", "label_dtype"), (_TEXT,)),
    **dict.fromkeys(("rows", "steps", "batch_size"), (_WHOLE,)),
    **dict.fromkeys(("loss_parameter", "step_size", "radius"), (_NUMBER, _NOTHING)),
    **dict.fromkeys(("dataset", "run"), (_TEXT, _NOTHING)),
    **dict.fromkeys(("notes", "not_measurable"), (_TEXTS,)),
    "target_scale": (_NUMBERS,),
    "named": (_FLAG,),
}
_EVALUATION: dict[str, tuple[str, ...]] = {
    "verdict": (_TEXT,),
    "private": (_FLAG,),
    "table": (_TEXT,),
    "rows": (_WHOLE,),
    **dict.fromkeys(("answer", "quantile", "factor"), (_NUMBER, _NOTHING)),
    **dict.fromkeys(("scale", "shares"), (_NUMBERS, _NOTHING)),
    "confusion": (_MATRIX, _NOTHING),
    "confusion_noise": (_MATRIX, _NUMBERS, _NUMBER, _NOTHING),
    **dict.fromkeys(("score", "baseline", "score_noise"), (_NUMBER, _NOTHING)),
}
_CURVES = {
    "roc": ("false_positive", "true_positive", "noise"),
    "calibration": ("predicted", "observed", "noise", "share"),
    "residuals": ("edges", "shares", "noise"),
}


def check_privacy(privacy: dict[str, Any]) -> None:
    """Raise unless this is what a run cost."""
    report_from_json(privacy)
    for name in ("epsilon", "delta"):
        if not _is(privacy[name], _NUMBER) or not privacy[name] >= 0:
            raise ValueError(f"{name} that is no number >= 0: {privacy[name]!r}")
    if not isinstance(privacy["seeded"], bool) or not _is(privacy.get("public", []), _TEXTS):
        raise ValueError("no flag `seeded`, or no list of texts `public`")


def check_made(made: dict[str, Any]) -> None:
    """Raise unless this says how a model was made."""
    if missing := [name for name in _REQUIRED if name not in made]:
        raise ValueError(f"no {', '.join(missing)}")
    _check(made, _MADE)


def check_evaluation(evaluation: dict[str, Any]) -> None:
    """Raise unless these are figures of a model, or none."""
    _check(evaluation, _EVALUATION)
    figures = _table(evaluation.get("figures", {}), "figures")
    for name, figure in figures.items():
        told = _table(figure, name)
        if not {"value", "noise"} <= told.keys() or not _is([*told.values()], _NUMBERS):
            raise ValueError(f"{name} without a value and its noise")
    for name, entries in _CURVES.items():
        curve = _table(evaluation.get(name) or {}, name)
        if curve and not (
            set(entries) <= curve.keys()
            and all(_is(entry, _NUMBERS) or _is(entry, _NUMBER) for entry in curve.values())
        ):
            raise ValueError(f"{name} without {', '.join(entries)}")
    if "test" in evaluation:
        test = _table(evaluation["test"], "test")
        if "test" in test or not {"table", "rows"} <= test.keys():
            raise ValueError("a test without its table and rows")
        check_evaluation(test)


def is_list_of_texts(value: Any) -> bool:
    return _is(value, _TEXTS)


def _check(values: dict[str, Any], kinds: dict[str, tuple[str, ...]]) -> None:
    for name in values.keys() & kinds.keys():
        if not any(_is(values[name], kind) for kind in kinds[name]):
            raise ValueError(f"{name} that is no {' or '.join(kinds[name])}: {values[name]!r}")


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} that is no table of entries")
    return value


def _is(value: Any, kind: str) -> bool:
    if kind == _NOTHING:
        return value is None
    if kind == _FLAG:
        return isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str) and _is_unicode(value)
    if kind == _TEXTS:
        return isinstance(value, list) and all(_is(item, _TEXT) for item in value)
    if kind in (_NUMBERS, _MATRIX):
        inner = _NUMBER if kind == _NUMBERS else _NUMBERS
        return isinstance(value, list) and all(_is(item, inner) for item in value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _WHOLE:
        return isinstance(value, int) and 0 <= value < 2**63
    return isinstance(value, float) or abs(value) < 2**63


def _is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON may hold halves of characters."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
