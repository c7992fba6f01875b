"""The settings of the object store tier, put together from KVBM's settings and from AWS's variables and files."""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvbm.config import Config

_WORKER = "{worker_id}"
_LOCAL = ("127.0.0.1", "localhost", "::1")


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one bucket. Secrets are left out of ``repr``, so that no log line or traceback shows them."""

    bucket: str
    endpoint: str = ""  # empty: AWS's own of the region
    region: str = ""
    access_key: str = ""
    secret_key: str = ""
    session_token: str = ""
    encryption_secret: str = ""
    timeout_seconds: float = 3.0  # of one request, with its body
    max_retries: int = 1
    concurrency: int = 32  # requests of one kind at a time
    memory_bytes: int = 256 << 20  # of all objects under way

    def __repr__(self) -> str:
        return f"ObjectSettings(bucket={self.bucket!r}, endpoint={self.endpoint!r}, region={self.region!r})"

    __str__ = __repr__

    def of_rank(self, rank: int) -> ObjectSettings:
        """``{worker_id}`` in the name of the bucket is the rank."""
        return msgspec.structs.replace(self, bucket=self.bucket.replace(_WORKER, str(rank)))

    @property
    def unsigned_payload(self) -> bool:
        """Whether the signature may leave out the payload: TLS protects it, or it does not leave the machine.

        Hashing it costs more than half of the client's CPU time of a write."""
        parts = urlsplit(self.endpoint)
        return parts.scheme in ("", "https") or parts.hostname in _LOCAL


def settings_for(config: Config, rank: int | None, environ: Mapping[str, str] | None = None) -> ObjectSettings:
    """The settings of one rank; None: of all ranks, see :meth:`ObjectSettings.of_rank`. Raises ValueError when they
    cannot be used; the text says which and why."""
    environ = os.environ if environ is None else environ
    if not config.object_bucket:
        raise ValueError("DYN_KVBM_OBJECT_BUCKET is not set. Set it to the name of a bucket that exists")
    if bool(config.object_access_key) != bool(config.object_secret_key):
        given, lacks = ("ACCESS", "SECRET") if config.object_access_key else ("SECRET", "ACCESS")
        raise ValueError(
            f"DYN_KVBM_OBJECT_{given}_KEY is set, but DYN_KVBM_OBJECT_{lacks}_KEY is not. Set both, or neither to use "
            "AWS's variables and files"
        )
    found = {} if config.object_access_key else _aws_credentials(environ)
    profile = _aws_profile(environ)
    endpoint = (
        config.object_endpoint
        or environ.get("AWS_ENDPOINT_URL_S3")
        or environ.get("AWS_ENDPOINT_URL")
        or profile.get("endpoint_url", "")
    )
    if "@" in urlsplit(endpoint).netloc:
        raise ValueError(
            "the URL of the object store holds credentials, and URLs are logged. Remove them from "
            "DYN_KVBM_OBJECT_ENDPOINT and set DYN_KVBM_OBJECT_ACCESS_KEY and DYN_KVBM_OBJECT_SECRET_KEY"
        )
    region = config.object_region or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    settings = ObjectSettings(
        bucket=config.object_bucket,
        endpoint=endpoint,
        region=region or profile.get("region") or "us-east-1",
        access_key=config.object_access_key or found.get("aws_access_key_id", ""),
        secret_key=config.object_secret_key or found.get("aws_secret_access_key", ""),
        session_token=found.get("aws_session_token", ""),
        encryption_secret=config.object_encryption_secret,
        timeout_seconds=config.object_timeout_secs,
        concurrency=config.object_concurrency,
        memory_bytes=config.object_memory_mb << 20,
    )
    return settings if rank is None else settings.of_rank(rank)


def _aws_credentials(environ: Mapping[str, str]) -> Mapping[str, str]:
    """From the variables, else from the files. Empty: obstore asks the role of the instance or container."""
    if environ.get("AWS_ACCESS_KEY_ID"):
        return {
            name: environ[name.upper()]
            for name in ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
            if environ.get(name.upper())
        }
    found = _section(_aws_file(environ, "AWS_SHARED_CREDENTIALS_FILE", "credentials"), _profile_name(environ))
    if found.get("aws_access_key_id"):
        return found
    profile = _aws_profile(environ)
    return profile if profile.get("aws_access_key_id") else {}


def _aws_profile(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The profile in AWS's config file: region, endpoint, sometimes credentials."""
    name = _profile_name(environ)
    return _section(_aws_file(environ, "AWS_CONFIG_FILE", "config"), name if name == "default" else f"profile {name}")


def _profile_name(environ: Mapping[str, str]) -> str:
    return environ.get("AWS_PROFILE") or "default"


def _aws_file(environ: Mapping[str, str], variable: str, name: str) -> Path:
    home = Path(environ.get("HOME") or "~").expanduser()
    return Path(environ.get(variable) or home / ".aws" / name)


def _section(path: Path, name: str) -> Mapping[str, str]:
    file = configparser.ConfigParser(interpolation=None)
    try:
        file.read(path)
    except (OSError, configparser.Error, UnicodeDecodeError):
        return {}
    return dict(file[name]) if name in file else {}
