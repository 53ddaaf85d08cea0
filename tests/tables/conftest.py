from collections.abc import Iterator

import pytest

from longtail.tables.database import Database, open_database


@pytest.fixture(scope="module")
def reader() -> Iterator[Database]:
    with open_database() as built:
        yield built
