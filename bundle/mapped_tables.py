"""What a release keeps of its bundle's tables as they are used: mapped by all that serve it, read by none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longtail.bundle.labels import Labels
from longtail.bundle.vocabulary import Vocabulary

LOOKUP, VOCABULARIES = "lookup.arrow", "vocabularies"


@dataclass(frozen=True)
class MappedTables:
    """The files below a directory that `write` made.

    Attributes:
        directory: the directory.
        names: of the files that are there, and were verified, relative to it.
    """

    directory: Path
    names: frozenset[str]

    @classmethod
    def write(cls, directory: Path, labels: Labels, vocabularies: Mapping[str, Vocabulary]) -> MappedTables:
        """Write the tables of a bundle; a vocabulary that is all labels in their order needs no file of its own.

        Raises:
            OSError: the disk is full or not writable.
        """
        labels.lookup.write(directory / LOOKUP)
        names = [LOOKUP]
        (directory / VOCABULARIES).mkdir()
        for name, vocabulary in vocabularies.items():
            if not vocabulary.ids.equals(labels.ids):
                names.append(_vocabulary(name))
                vocabulary.write_mappable(directory / names[-1])
        return cls(directory, frozenset(names))

    @property
    def lookup(self) -> Path:
        """The file that finds labels by id."""
        return self.directory / LOOKUP

    def vocabulary(self, name: str, labels: Labels, *, verify: bool) -> Vocabulary:
        """Map a vocabulary of the bundle.

        Args:
            name: of the vocabulary.
            labels: the bundle's.
            verify: whether to look at all of it.
        """
        if _vocabulary(name) not in self.names:
            return Vocabulary.of_labels(labels)
        return Vocabulary.map(self.directory / _vocabulary(name), verify=verify)


def _vocabulary(name: str) -> str:
    return f"{VOCABULARIES}/{name}.arrow"
