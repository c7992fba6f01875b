from __future__ import annotations

import pytest
from engine_pages import open_store


@pytest.fixture
def stores(tmp_path):
    made = []

    def make(host=0, disk=64, **options):
        made.append(open_store(tmp_path, host, disk, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
