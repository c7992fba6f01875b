"""The server that stands in for nginx in the object store benchmarks."""

import os

import pytest

from kvbm.tiers.objects.client import Client, MissingError
from kvbm.tiers.objects.settings import ObjectSettings


@pytest.fixture
def target(benchmark_script):
    with benchmark_script("object_target").server(None) as found:
        yield found


def test_objects_come_back_from_the_server_in_python(target):
    settings = ObjectSettings(
        bucket="b", endpoint=target.endpoint, region="r", access_key="k", secret_key="s", timeout_seconds=60.0
    )
    client = Client(settings)
    objects = {f"folder/object {i}": os.urandom(size) for i, size in enumerate((0, 1, 4096, 3_000_001))}
    for name, data in objects.items():
        assert client.put(name, [data])
    for name, data in objects.items():
        assert bytes(client.get(name)) == data
        assert client.head(name)[0].bytes == len(data)
    name = "folder/object 3"
    client.put(name, [b"another"])  # as nginx does: the benchmarks write the same objects over and over
    assert bytes(client.get(name)) == b"another"
    client.check()  # an empty listing
    target.clear()
    assert not client.exists("folder/object 1")
    with pytest.raises(MissingError):
        client.get(name)
