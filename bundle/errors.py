"""What can be wrong with a bundle. Every message says what was expected, what was found, and where."""


class BundleError(Exception):
    """Base of everything this package raises."""


class BundleExistsError(BundleError):
    """The target of a write is already there; nothing was touched."""


class BundleCorruptError(BundleError):
    """A file is missing, unreadable, or not the one that was written (sha256)."""


class BundleVersionError(BundleError):
    """The bundle's schema version is newer than this installation reads."""


class BundleInvariantError(BundleError):
    """Files are intact but contradict the contract of FORMAT.md.

    Args:
        invariant: the rule that broke, in words.
        expected: what the rule asks for.
        found: what is there.
    """

    def __init__(self, invariant: str, *, expected: object, found: object) -> None:
        super().__init__(f"bundle invariant broken: {invariant}: expected {expected}, found {found}")
        self.invariant = invariant
