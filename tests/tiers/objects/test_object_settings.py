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
