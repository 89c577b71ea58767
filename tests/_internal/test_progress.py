"""Progress bars: nothing is lost or added, and a bar is drawn only when it should be."""

import sys

import pytest

from privagrad._internal import progress


class Terminal:
    """Standard error that says it is a terminal and keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("show", "patience", "shown"),
    [(True, 1e9, True), (False, -1.0, False), (None, -1.0, True), (None, 1e9, False)],
)
def test_a_terminal_sees_a_bar_at_once_or_when_it_takes_long(
    show: bool | None, patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", patience)
    assert list(progress.track(range(200), 200, "steps", show)) == list(range(200))
    assert ("steps" in terminal.text) == shown


@pytest.mark.parametrize("total", [3, 10, 19, 95])
def test_notebooks_see_plain_lines_if_they_ask(
    total: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    assert list(progress.track(range(total), total, "steps", None)) == list(range(total))
    assert capsys.readouterr().err == ""
    assert list(progress.track(range(total), total, "steps", True)) == list(range(total))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"steps: {total}/{total}"
    assert len(lines) <= 11
