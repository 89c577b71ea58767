"""A bug as a value: what is changed in the source, and which tests notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One privacy bug.

    Attributes
    ----------
    name : str
        What is wrong with it, in a few words.
    file : str
        The file below src/privagrad that it changes.
    old, new : str
        The text that is there, exactly once, and what it is changed to.
    tests : tuple of str
        Tests of `make test` that catch it, as pytest names them: file::function or
        file::Class::method, without parameters, or with them where a few of many are enough.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self, tree: Path = ROOT) -> Path:
        """The changed file in a tree like that of the project."""
        return tree / "src" / "privagrad" / self.file

    def apply(self, tree: Path) -> None:
        """Put the bug into a tree."""
        path = self.source(tree)
        text = path.read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(
                f"Expected the text of {self.name!r} once in {self.file}, found it {found} times: "
                "change the mutant as the code has changed."
            )
        path.write_text(text.replace(self.old, self.new))
