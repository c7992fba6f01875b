"""Where the settings come from, and that secrets are never shown."""

import pytest

from kvbm.cli.main import main
from kvbm.config import load
from kvbm.tiers.objects.settings import settings_for

ENABLED = {"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "kv-{worker_id}"}
SECRETS = {
    "DYN_KVBM_OBJECT_ACCESS_KEY": "AKIDexposed",
    "DYN_KVBM_OBJECT_SECRET_KEY": "s3cretexposed",
    "KVBM_OBJECT_ENCRYPTION_SECRET": "cipherexposed",
}


def settings(environ, rank=0):
    return settings_for(load(environ=environ), rank, environ)


def test_upstreams_settings_are_read():
    others = {
        "DYN_KVBM_OBJECT_ENDPOINT": "http://127.0.0.1:9",
        "DYN_KVBM_OBJECT_REGION": "x",
        "KVBM_OBJECT_TIMEOUT_SECS": "7",
        "KVBM_OBJECT_CONCURRENCY": "5",
        "KVBM_OBJECT_MEMORY_MB": "3",
    }
    found = settings({**ENABLED, **SECRETS, **others}, 4)
    assert (found.bucket, found.endpoint, found.region) == ("kv-4", "http://127.0.0.1:9", "x")
    assert (found.access_key, found.secret_key, found.encryption_secret) == tuple(SECRETS.values())
    assert (found.timeout_seconds, found.concurrency, found.memory_bytes) == (7, 5, 3 << 20)


def test_credentials_come_from_aws_variables_and_files(tmp_path):
    variables = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_SESSION_TOKEN": "c", "AWS_REGION": "r"}
    found = settings({**ENABLED, **variables})
    assert (found.access_key, found.secret_key, found.session_token, found.region) == ("a", "b", "c", "r")
    (tmp_path / ".aws").mkdir()
    file = tmp_path / ".aws" / "credentials"
    file.write_text("[default]\naws_access_key_id = d\naws_secret_access_key = e%f\n[other]\naws_access_key_id = g\n")
    found = settings({**ENABLED, "HOME": str(tmp_path)})
    assert (found.access_key, found.secret_key) == ("d", "e%f")
    found = settings({**ENABLED, "AWS_SHARED_CREDENTIALS_FILE": str(file), "AWS_PROFILE": "other"})
    assert found.access_key == "g"
    assert settings({**ENABLED, "HOME": "/nonexistent"}).access_key == ""
    assert settings({**ENABLED, **SECRETS, **variables}).access_key == "AKIDexposed", "KVBM's own settings win"


def test_settings_that_cannot_be_used_say_which():
    with pytest.raises(ValueError, match="DYN_KVBM_OBJECT_BUCKET is not set"):
        settings({"DYN_KVBM_OBJECT_ENABLED": "1"})
    with pytest.raises(ValueError, match="DYN_KVBM_OBJECT_SECRET_KEY is not"):
        settings({**ENABLED, "DYN_KVBM_OBJECT_ACCESS_KEY": "x"})


@pytest.mark.parametrize(
    ("endpoint", "unsigned"),
    [
        ("", True),
        ("https://s3.example.com", True),
        ("http://127.0.0.1:9000", True),
        ("http://[::1]:9000", True),
        ("http://10.0.0.1:9000", False),
        ("http://localhost.example.com", False),
    ],
)
def test_the_payload_is_signed_where_others_could_change_it_on_the_way(endpoint, unsigned):
    assert settings({**ENABLED, "DYN_KVBM_OBJECT_ENDPOINT": endpoint}).unsigned_payload is unsigned


def test_secrets_are_never_shown(monkeypatch, capsys):
    for name, value in {**ENABLED, **SECRETS}.items():
        monkeypatch.setenv(name, value)
    found = settings({**ENABLED, **SECRETS})
    shown = f"{found!r} {found!s} {found}"
    main(["config"])
    shown += capsys.readouterr().out
    main(["config", "--json"])
    shown += capsys.readouterr().out
    assert "KVBM_OBJECT_ENCRYPTION_SECRET" in shown or "object_encryption_secret" in shown
    assert "exposed" not in shown


def test_region_and_endpoint_come_from_aws_files_too(tmp_path):
    file = tmp_path / "config"
    file.write_text(
        "[default]\nregion = eu-1\n[profile p]\nregion = eu-2\nendpoint_url = http://127.0.0.1:7\n"
        "aws_access_key_id = k\naws_secret_access_key = s\n"
    )
    environ = {**ENABLED, "HOME": str(tmp_path), "AWS_CONFIG_FILE": str(file)}
    assert settings(environ).region == "eu-1"
    found = settings({**environ, "AWS_PROFILE": "p"})
    assert (found.region, found.endpoint, found.access_key) == ("eu-2", "http://127.0.0.1:7", "k")
    assert settings({**environ, "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:8"}).endpoint == "http://127.0.0.1:8"


def test_credentials_in_the_url_are_refused_and_not_shown(monkeypatch, capsys):
    with pytest.raises(ValueError, match="DYN_KVBM_OBJECT_ENDPOINT") as refused:
        settings({**ENABLED, "DYN_KVBM_OBJECT_ENDPOINT": "https://me:exposed@s3.example.com"})
    assert "exposed" not in str(refused.value)
    for arguments in (["config"], ["config", "--json"]):
        monkeypatch.setenv("DYN_KVBM_OBJECT_ENDPOINT", "https://me:exposed@s3.example.com/path")
        main(arguments)
        shown = capsys.readouterr().out
        assert "exposed" not in shown
        assert "s3.example.com/path" in shown


def test_kvbms_own_credentials_take_no_session_token_of_the_environment(weed, monkeypatch):
    pytest.importorskip("obstore")
    from kvbm.tiers.objects.client import Client

    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-other-credentials")
    Client(weed.settings()).check()
