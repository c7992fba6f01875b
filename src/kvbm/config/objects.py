"""The settings of the object store. `Config` derives from this part of the table."""

from typing import Annotated

import msgspec

from kvbm.config.kinds import Number, Switch, Text
from kvbm.config.setting import OBJECTS, Setting


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    # fmt: off
    object_enabled: Annotated[bool, Setting(
        "DYN_KVBM_OBJECT_ENABLED", OBJECTS, Switch(),
        "Keep blocks in an S3-compatible object store, where every engine of the same model finds them. Needs a host "
        "tier and the extra `objects`: `pip install 'kvbm[objects]'`.",
    )] = False
    object_bucket: Annotated[str, Setting(
        "DYN_KVBM_OBJECT_BUCKET", OBJECTS,
        Text(noun="a bucket name without spaces or slashes", pattern=r"[^\s/]+", example="kvbm-{worker_id}"),
        "Name of the bucket, which must exist. `{worker_id}` in it is replaced by the rank of the worker.",
    )] = ""
    object_endpoint: Annotated[str, Setting(
        "DYN_KVBM_OBJECT_ENDPOINT", OBJECTS,
        Text(noun="an http or https URL", pattern=r"https?://[^\s/]+(/\S*)?", example="http://127.0.0.1:9000"),
        "URL of the object store. Empty: AWS S3 in DYN_KVBM_OBJECT_REGION.",
    )] = ""
    object_region: Annotated[str, Setting(
        "DYN_KVBM_OBJECT_REGION", OBJECTS,
        Text(noun="a region name", pattern=r"[A-Za-z0-9_-]+", example="us-east-1"),
        "Region of the bucket.",
    )] = ""
    object_access_key: Annotated[str, Setting(
        "DYN_KVBM_OBJECT_ACCESS_KEY", OBJECTS, Text(),
        "Access key of the object store. Without it KVBM uses AWS's variables, credentials file or role. KVBM never "
        "prints it.", secret=True,
    )] = ""
    object_secret_key: Annotated[str, Setting(
        "DYN_KVBM_OBJECT_SECRET_KEY", OBJECTS, Text(),
        "Secret key of the object store. KVBM never prints it.", secret=True,
    )] = ""
    object_num_blocks: Annotated[int, Setting(
        "DYN_KVBM_OBJECT_NUM_BLOCKS", OBJECTS, Number(unit="blocks", high=2**31 - 1, example="10000"),
        "Maximum number of blocks of one cache in the object store; the oldest are deleted. 0 means no limit: give the "
        "bucket a lifecycle rule.",
    )] = 0
    object_encryption_secret: Annotated[str, Setting(
        "KVBM_OBJECT_ENCRYPTION_SECRET", OBJECTS, Text(),
        "Secret from which KVBM derives the keys that encrypt objects (AES-GCM) and hide their names. Every engine "
        "that shares the bucket needs the same one. Empty: no encryption. KVBM never prints it.", secret=True,
    )] = ""
    object_timeout_secs: Annotated[float, Setting(
        "KVBM_OBJECT_TIMEOUT_SECS", OBJECTS,
        Number(unit="seconds", low=0, high=3600, whole=False, above=True, example="3"),
        "Time in seconds after which KVBM gives up one request to the object store. The engine then recomputes the "
        "missing blocks.",
    )] = 3.0
    object_lookup_secs: Annotated[float, Setting(
        "KVBM_OBJECT_LOOKUP_SECS", OBJECTS, Number(unit="seconds", low=0, high=60, whole=False, example="0.25"),
        "Maximum time in seconds that a request waits until KVBM knows which of its blocks are in the object store. "
        "0: a request never waits, and uses what is known at that moment.",
    )] = 0.25
    object_concurrency: Annotated[int, Setting(
        "KVBM_OBJECT_CONCURRENCY", OBJECTS, Number(unit="requests", low=1, high=256, example="32"),
        "Maximum number of requests of one kind (reads, writes, existence checks) that a rank has under way.",
    )] = 32
    object_memory_mb: Annotated[int, Setting(
        "KVBM_OBJECT_MEMORY_MB", OBJECTS, Number(unit="MiB", low=1, high=65536, example="256"),
        "Host memory of a rank, in MiB, for objects on their way to and from the object store.",
    )] = 256
    # fmt: on
