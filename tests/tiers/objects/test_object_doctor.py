"""The doctor's checks tell a good store from each kind of bad one."""

import pytest
from object_servers import SECRET_KEY

from kvbm.tiers.objects import doctor
from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import ROOT


def test_a_good_store_passes_every_check(weed):
    settings = weed.settings()
    for check in (doctor.check_reachable, doctor.check_credentials, doctor.check_clock):
        found = check(settings)
        assert found.good, found
    assert 0 < doctor.measure_latency(settings) < 30
    speed = doctor.measure_speed(settings)
    assert speed.read > 1e5
    assert speed.write > 1e5
    assert not list(Client(settings).list(f"{ROOT}/doctor/")), "the checks leave nothing behind"


def test_a_store_that_is_not_there_is_not_reachable(weed):
    found = doctor.check_reachable(weed.settings(endpoint="http://127.0.0.1:1"))
    assert not found.good
    assert "DYN_KVBM_OBJECT_ENDPOINT" in found.cure
    assert not doctor.check_clock(weed.settings(endpoint="http://127.0.0.1:1")).good


@pytest.mark.parametrize("change", [{"secret_key": "wrong"}, {"bucket": "kvbm-no-such-bucket"}])
def test_wrong_credentials_are_found_and_not_shown(weed, change):
    settings = weed.settings(**change)
    found = doctor.check_credentials(settings)
    assert not found.good
    assert "DYN_KVBM_OBJECT_BUCKET" in found.cure
    assert SECRET_KEY not in str(found)
    with pytest.raises(ObjectStoreError):
        doctor.measure_speed(settings)


def test_clocks_that_differ_are_found(weed, monkeypatch):
    real = doctor.time.time
    monkeypatch.setattr(doctor.time, "time", lambda: real() + 3600)
    found = doctor.check_clock(weed.settings())
    assert not found.good
    assert "ahead of" in found.text
    assert "NTP" in found.cure


def test_a_store_without_conditional_writes_is_refused(weed, proxy):
    """The proxy reports the second write as successful, as a store does that ignores If-None-Match."""
    proxy.set_fault("no-conditions")
    found = doctor.check_credentials(weed.settings(endpoint=proxy.endpoint))
    assert not found.good
    assert "If-None-Match" in found.text
