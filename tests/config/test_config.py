"""Settings: what is accepted, which place wins, and what the user is told when something is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm import config
from kvbm.config import SETTINGS, Config, ConfigError, Number, load, require_tier, slots_for

ROWS = {row.key: row for row in SETTINGS}
LIVE = [row for row in SETTINGS if not row.retired]


def from_env(**environ: str) -> Config:
    return load(environ=environ, files=())


def from_extra(**extra: object) -> Config:
    return load(extra, environ={}, files=())


def toml_file(folder: Path, text: str, name: str = "kvbm.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


# ---- the table ----


@pytest.mark.parametrize("row", LIVE, ids=lambda row: row.key)
def test_a_default_has_the_type_of_its_field(row):
    msgspec.convert(row.default, get_type_hints(Config)[row.key], strict=True)


@pytest.mark.parametrize("row", LIVE, ids=lambda row: row.key)
def test_a_default_would_itself_be_accepted(row):
    if row.default is not None:
        assert getattr(from_extra(**{row.key: row.default}), row.key) == row.default


def test_names_are_unique_and_every_row_is_documented():
    names = [name for row in SETTINGS for name in (row.key, row.env, *row.old_names)]
    assert len(names) == len(set(names))
    for row in SETTINGS:
        assert row.group in config.GROUPS
        assert re.fullmatch(r"[a-z][a-z0-9_]*", row.key)
        assert row.doc.endswith(".")


def test_every_variable_of_the_product_this_one_succeeds_is_known():
    names = """
        CPU_CACHE_GB CPU_CACHE_OVERRIDE_NUM_BLOCKS DISK_CACHE_GB DISK_CACHE_OVERRIDE_NUM_BLOCKS DISK_CACHE_DIR
        DISK_ALLOCATOR_TYPE DISK_DISABLE_O_DIRECT DISK_ZEROFILL_FALLBACK DISABLE_DISK_OFFLOAD_FILTER
        DISABLE_WRITE_COMBINED ENABLE_NUMA HOST_OFFLOAD_PREFIX_MIN_PRIORITY MAX_CONCURRENT_TRANSFERS
        MAX_TRANSFER_BATCH_SIZE TRANSFER_BATCH_SIZE LEADER_WORKER_INIT_TIMEOUT_SECS LEADER_ZMQ_HOST
        LEADER_ZMQ_PUB_PORT LEADER_ZMQ_ACK_PORT METRICS METRICS_PORT CACHE_STATS_MAX_REQUESTS
        CACHE_STATS_LOG_INTERVAL_SECS ENABLE_RECORD KV_EVENTS_ENABLE_CONSOLIDATOR KV_EVENTS_CONSOLIDATOR_MODE
        TRTLLM_ZMQ_PORT ENABLE NCCL_MLA_MODE NCCL_MAX_CTAS OBJECT_ENABLED OBJECT_BUCKET OBJECT_ENDPOINT
        OBJECT_REGION OBJECT_ACCESS_KEY OBJECT_SECRET_KEY OBJECT_NUM_BLOCKS
    """
    known = {name for row in SETTINGS for name in (row.env, *row.old_names)}
    assert {f"DYN_KVBM_{name}" for name in names.split()} <= known
    assert {"DYN_MEMORY_DISABLE_NUMA", "DYN_RUNTIME_ENABLED_KVBM", "DYN_CONNECTOR", "ENABLE_KVBM_RECORD"} <= known


def test_defaults_when_nothing_is_set():
    defaults = from_env()
    assert all(getattr(defaults, row.key) == row.default for row in LIVE)
    assert set(defaults.sources.values()) == {"default"}
    assert defaults.warnings == ()
    assert defaults.unused == ()
    assert defaults.leader_pub_url.endswith("/leader-56001")
    assert defaults.leader_ack_url.endswith("/leader-56002")
    assert defaults.consolidator_port == 57001


def test_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        from_env().cpu_cache_gb = 1.0  # type: ignore[misc]


def test_importing_the_settings_pulls_in_nothing_heavy():
    code = "import sys, kvbm.config; print([m for m in ('torch', 'numpy', 'zmq', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- values that are accepted ----

GOOD = [
    ("DYN_KVBM_CPU_CACHE_GB", "0.5", 0.5),
    ("DYN_KVBM_CPU_CACHE_GB", " 20 ", 20.0),
    ("DYN_KVBM_CPU_CACHE_GB", "0", 0.0),
    ("DYN_KVBM_CPU_CACHE_GB", ".25", 0.25),
    ("DYN_KVBM_CPU_CACHE_GB", "1e3", 1000.0),
    ("DYN_KVBM_DISK_CACHE_GB", "0.5", 0.5),
    ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "10000", 10000),
    ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "1024", 1024),
    ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "65535", 65535),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "node-3.cluster.local", "node-3.cluster.local"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "::1", "::1"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "[fe80::1%eth0]", "fe80::1%eth0"),
    ("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "100", 100),
    ("DYN_KVBM_DISK_CACHE_DIR", "/mnt/nvme", Path("/mnt/nvme")),
    ("DYN_KVBM_DISK_ALLOCATOR_TYPE", "open-direct", "open-direct"),
    ("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "PassThrough", "passthrough"),
    ("DYN_KVBM_TRTLLM_ZMQ_PORT", "20081", 20081),
    ("DYN_KVBM_OBJECT_ENDPOINT", "https://store.example:9000/path", "https://store.example:9000/path"),
    ("DYN_KVBM_OBJECT_BUCKET", "kv-{worker_id}", "kv-{worker_id}"),
    ("KVBM_ONBOARD", "Async", "async"),
    ("KVBM_ONBOARD", "intra", "sync"),
    ("KVBM_ONBOARD", "inter", "async"),
    ("KVBM_STAGING_MB", "64", 64),
    ("KVBM_PACK", "on", "on"),
    ("KVBM_PACK", "0", "off"),
    ("KVBM_MAX_PENDING_OFFLOADS", "1", 1),
    ("KVBM_INJECT_FAULTS", "load:0.1", "load:0.1"),
    ("KVBM_TENANT_SHARES", " acme=0.3, a=b=.7 ", "acme=0.3, a=b=.7"),
]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_good_value_is_taken(name, text, value):
    row = next(row for row in SETTINGS if row.env == name)
    taken = from_env(**{name: text})
    assert getattr(taken, row.key) == value
    assert taken.sources[row.key] == "environment"


@pytest.mark.parametrize("word", ["1", "true", "on", "yes", "TRUE", " Yes "])
@pytest.mark.parametrize("name", [row.env for row in LIVE if isinstance(row.kind, config.Switch)])
def test_words_that_switch_on(name, word):
    row = next(row for row in SETTINGS if row.env == name)
    assert getattr(from_env(**{name: word}), row.key) is True


@pytest.mark.parametrize("word", ["0", "false", "off", "no", "", "  ", "False", " OFF "])
@pytest.mark.parametrize("name", [row.env for row in LIVE if isinstance(row.kind, config.Switch)])
def test_words_that_switch_off(name, word):
    row = next(row for row in SETTINGS if row.env == name)
    assert getattr(from_env(**{name: word}), row.key) is False


@pytest.mark.parametrize("key", ["disk_disable_o_direct", "disk_zerofill_fallback"])
def test_any_other_word_switches_on_what_used_to_count_by_presence(key):
    assert getattr(from_env(**{ROWS[key].env: "please"}), key) is True


@pytest.mark.parametrize(("value", "on"), [(True, True), (False, False), (1, True), (0, False), ("on", True)])
def test_switches_in_json(value, on):
    assert from_extra(offload_decode=value).offload_decode is on


def test_a_path_may_begin_with_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert from_extra(disk_cache_dir="~/kv").disk_cache_dir == Path("/home/someone/kv")


@pytest.mark.parametrize("row", [row for row in LIVE if not isinstance(row.kind, config.Switch)], ids=lambda r: r.key)
def test_an_empty_variable_counts_as_not_set(row):
    if row.key != "nixl_backends":
        empty = from_env(**{row.env: " "})
        assert getattr(empty, row.key) == row.default
        assert empty.sources[row.key] == "default"


def test_null_in_json_counts_as_not_set():
    both = load({"cpu_cache_gb": None}, environ={"DYN_KVBM_CPU_CACHE_GB": "3"}, files=())
    assert both.cpu_cache_gb == 3.0
    assert both.sources["cpu_cache_gb"] == "environment"
    assert from_extra(nixl_backends=None, onboard=None, enable_numa=None) == from_env()


# ---- values that are not ----

BAD_NUMBERS = ["abc", "-1", "nan", "inf", "-inf", "1_000", "20GB", "0x10", "1 2", "1e999", "9" * 40, "٣"]
SWITCHES = [row.env for row in LIVE if isinstance(row.kind, config.Switch) and not row.kind.presence]
WHOLE = [row.env for row in LIVE if isinstance(row.kind, Number) and row.kind.whole]
DECIMAL = [row.env for row in LIVE if isinstance(row.kind, Number) and not row.kind.whole]

GIGABYTES = "a number of gigabytes (1 GB = 1e9 bytes) >= 0, for example 20 or 0.5"
BLOCKS = "a whole number of blocks from 0 to 2147483647"
PORT = "a whole number from 1 to 65535"
SWITCH = "1, true, on or yes to turn it on, 0, false, off or no to turn it off"

BAD = [
    ("DYN_KVBM_CPU_CACHE_GB", "abc", GIGABYTES),
    ("DYN_KVBM_DISK_CACHE_GB", "-0.5", GIGABYTES),
    ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "1.5", BLOCKS),
    ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", "2147483648", BLOCKS),
    ("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", "-1", BLOCKS),
    ("DYN_KVBM_OBJECT_NUM_BLOCKS", "many", BLOCKS),
    ("DYN_KVBM_DISK_ALLOCATOR_TYPE", "direct", "one of default, open-direct"),
    ("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "101", "a whole number from 0 to 100"),
    ("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "0", "a whole number of batches >= 1"),
    ("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", "0", "a whole number of blocks >= 1"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "tcp://10.0.0.1", "a host name or IP address without scheme or port"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "10.0.0.1:5600", "a host name or IP address without scheme or port"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "*", "a host name or IP address without scheme or port"),
    ("DYN_KVBM_LEADER_ZMQ_HOST", "two words", "a host name or IP address without scheme or port"),
    ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "0", PORT),
    ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "65536", PORT),
    ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "http", PORT),
    ("DYN_KVBM_METRICS_PORT", "70000", PORT),
    ("DYN_KVBM_TRTLLM_ZMQ_PORT", "0", PORT),
    ("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", "0", "a whole number of seconds from 1 to 1000000"),
    ("DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", "0.5", "a whole number of seconds from 1 to 1000000"),
    ("DYN_KVBM_CACHE_STATS_MAX_REQUESTS", "0", "a whole number of requests >= 1"),
    ("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "both", "one of dedup, passthrough"),
    ("DYN_KVBM_NCCL_MAX_CTAS", "0", "a whole number of CTAs from 1"),
    ("DYN_KVBM_NIXL_BACKEND_UCX", "", SWITCH),
    ("DYN_KVBM_NIXL_BACKEND_UCX", "perhaps", SWITCH),
    ("DYN_KVBM_OBJECT_BUCKET", "a/b", "a bucket name without spaces or slashes, for example kvbm-{worker_id}"),
    ("DYN_KVBM_OBJECT_ENDPOINT", "127.0.0.1:9000", "an http or https URL, for example http://127.0.0.1:9000"),
    ("DYN_KVBM_OBJECT_REGION", "us east", "a region name, for example us-east-1"),
    ("KVBM_ONBOARD", "asink", "one of auto, sync, async, intra (= sync), inter (= async)"),
    ("KVBM_PACK", "maybe", "auto, on, off"),
    ("KVBM_STAGING_MB", "-1", "a whole number of MiB from 0 to 65536"),
    ("KVBM_STAGING_MB", "65537", "a whole number of MiB from 0 to 65536"),
    ("KVBM_MAX_PENDING_OFFLOADS", "0", "a whole number of blocks >= 1"),
    ("KVBM_CONFIG_PATH", "a\0b", "a path"),
    *[("KVBM_TENANT_SHARES", text, "NAME=SHARE") for text in ("acme", "=1", "a=0", "a=0.6,b=0.5", "a=.1,a=.1", "a=x")],
    ("DYN_KVBM_DISK_CACHE_DIR", "a\0b", "a path, for example /mnt/nvme/kvbm"),
    *[(name, "maybe", SWITCH) for name in SWITCHES],
    *[(name, text, "number") for name in WHOLE + DECIMAL for text in BAD_NUMBERS],
    *[(name, "2.5", "a whole number") for name in WHOLE],
]


@pytest.mark.parametrize(("name", "text", "accepted"), BAD)
def test_a_bad_variable_is_named_with_its_value_and_what_is_accepted(name, text, accepted):
    with pytest.raises(ConfigError) as caught:
        from_env(**{name: text})
    assert str(caught.value).startswith(f"{name}={text!r} (environment): expected ")
    assert accepted in str(caught.value)


@pytest.mark.parametrize("row", LIVE, ids=lambda row: row.key)
def test_a_value_of_the_wrong_type_is_named_with_its_file_and_what_is_accepted(row, tmp_path):
    path = toml_file(tmp_path, f"{row.key} = [1, 2]\n")
    if row.key == "config_path":
        assert load(environ={}, files=[path]).warnings == (
            f"config_path ({path}) is ignored: a settings file cannot name another file",
        )
        return
    with pytest.raises(ConfigError) as caught:
        load(environ={}, files=[path])
    shown = "(hidden)" if row.secret else "[1, 2]"
    assert str(caught.value).startswith(f"{row.key}={shown} ({path}): expected {row.kind.accepts()}")


@pytest.mark.parametrize("row", [row for row in LIVE if isinstance(row.kind, Number)], ids=lambda row: row.key)
@pytest.mark.parametrize("value", [True, float("nan"), float("inf"), -1, "", [], 10**400])
def test_numbers_in_json_are_as_strict_as_in_the_environment(row, value):
    with pytest.raises(ConfigError, match=re.escape(f"{row.key}={value!r} (kv_connector_extra_config): expected")):
        from_extra(**{row.key: value})


def test_the_message_of_the_manual():
    with pytest.raises(ConfigError) as caught:
        from_env(DYN_KVBM_CPU_CACHE_GB="abc")
    assert str(caught.value) == (
        "DYN_KVBM_CPU_CACHE_GB='abc' (environment): expected a number of gigabytes (1 GB = 1e9 bytes) >= 0, "
        "for example 20 or 0.5"
    )


def test_an_absurd_number_is_refused_and_not_overflowed():
    with pytest.raises(ConfigError, match="the largest accepted number is 1000000000000000"):
        from_env(DYN_KVBM_CPU_CACHE_GB="1e300")


def test_everything_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        from_env(DYN_KVBM_CPU_CACHE_GB="abc", KVBM_STAGING_MB="-1", DYN_KVBM_METRICS="maybe")
    assert len(caught.value.problems) == 3
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_a_slip_in_a_choice_gets_a_hint():
    with pytest.raises(ConfigError, match=r"did you mean passthrough\?"):
        from_env(DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE="passthru")


def test_secrets_are_never_shown():
    secret = from_env(DYN_KVBM_OBJECT_SECRET_KEY="hunter2", DYN_KVBM_OBJECT_ACCESS_KEY="AKIA")
    assert secret.object_secret_key == "hunter2"
    assert "hunter2" not in repr(secret)
    assert "AKIA" not in repr(secret)
    with pytest.raises(ConfigError) as caught:
        from_extra(object_secret_key=["hunter2"])
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"[0-9]{1,20}\.?[0-9]{0,9}(e[0-9]{1,4})?", fullmatch=True))
def test_any_text_is_either_a_size_or_a_config_error(text):
    try:
        size = from_env(DYN_KVBM_CPU_CACHE_GB=text).cpu_cache_gb
    except ConfigError:
        return
    assert 0 <= size <= 10**15


# ---- which place wins ----


def test_precedence_from_the_default_up(tmp_path):
    system = toml_file(tmp_path, "cpu_cache_gb = 1\n", "system.toml")
    named = toml_file(tmp_path, "cpu_cache_gb = 2\n", "named.toml")
    environ: dict[str, str] = {}

    def now(extra: dict[str, object], *files: Path) -> tuple[float, str]:
        got = load(extra, environ, files)
        return got.cpu_cache_gb, got.sources["cpu_cache_gb"]

    assert now({}) == (0.0, "default")
    assert now({}, system) == (1.0, str(system))
    environ["KVBM_CONFIG_PATH"] = str(named)
    assert now({}, system) == (2.0, str(named))
    environ["DYN_KVBM_CPU_CACHE_GB"] = "3"
    assert now({}, system) == (3.0, "environment")
    assert now({"cpu_cache_gb": 4}, system) == (4.0, "kv_connector_extra_config")


def test_places_complement_each_other(tmp_path):
    path = toml_file(tmp_path, "staging_mb = 8\nonboard = 'sync'\n")
    got = load({"onboard": "async"}, {"KVBM_CONFIG_PATH": str(path), "DYN_KVBM_CPU_CACHE_GB": "1"}, ())
    assert (got.staging_mb, got.onboard, got.cpu_cache_gb) == (8, "async", 1.0)
    assert got.sources["staging_mb"] == str(path)
    assert got.config_path == path


def test_the_system_file_is_read_when_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(config.table, "SYSTEM_FILE", tmp_path / "kvbm.toml")
    assert load(environ={}).cpu_cache_gb == 0.0
    toml_file(tmp_path, "cpu_cache_gb = 7\n")
    assert load(environ={}).cpu_cache_gb == 7.0


def test_the_environment_of_the_process_is_the_default(monkeypatch):
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "9")
    assert load(files=()).cpu_cache_gb == 9.0


@pytest.mark.parametrize("name", ["cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB"])
def test_files_and_json_take_the_key_and_the_name_of_the_variable(name, tmp_path):
    assert from_extra(**{name: 2}).cpu_cache_gb == 2.0
    assert load(environ={}, files=[toml_file(tmp_path, f"{name} = 2\n")]).cpu_cache_gb == 2.0


def test_a_key_is_not_a_variable():
    lower = from_env(cpu_cache_gb="5", onboard="sideways")
    assert lower.cpu_cache_gb == 0.0
    assert lower.warnings == ()


def test_json_may_name_the_file(tmp_path):
    path = toml_file(tmp_path, "cpu_cache_gb = 2\n")
    got = load({"config_path": str(path)}, {"KVBM_CONFIG_PATH": "/nowhere/kvbm.toml"}, ())
    assert got.cpu_cache_gb == 2.0


def test_a_wrong_value_can_be_put_right_from_above():
    got = load({"cpu_cache_gb": 1}, {"DYN_KVBM_CPU_CACHE_GB": "abc"}, ())
    assert got.cpu_cache_gb == 1.0


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"cpu_cache_gb = \n", "not a TOML file"), (b"\xff\xfe", "not a TOML file")],
)
def test_a_file_that_cannot_be_read_is_named_with_who_named_it(content, said, tmp_path):
    path = tmp_path / "kvbm.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{path} (named by KVBM_CONFIG_PATH, environment): {said}")):
        from_env(KVBM_CONFIG_PATH=str(path))


# ---- names ----


def test_an_old_name_still_works_and_asks_to_be_renamed():
    old = from_env(ENABLE_KVBM_RECORD="1")
    assert old.enable_record is True
    assert old.warnings == ("ENABLE_KVBM_RECORD (environment) is the old name of DYN_KVBM_ENABLE_RECORD; rename it",)


@pytest.mark.parametrize("order", [1, -1])
def test_the_current_name_wins_over_the_old_one(order):
    names = [("ENABLE_KVBM_RECORD", "1"), ("DYN_KVBM_ENABLE_RECORD", "0")][::order]
    both = from_env(**dict(names))
    assert both.enable_record is False
    assert "ENABLE_KVBM_RECORD (environment) is ignored: DYN_KVBM_ENABLE_RECORD sets the same setting" in both.warnings


def test_two_names_in_one_place_are_noticed():
    both = from_extra(cpu_cache_gb=1, DYN_KVBM_CPU_CACHE_GB=2)
    assert both.cpu_cache_gb == 2.0
    assert len(both.warnings) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("DYN_KVBM_ENABLE_NUMA", "deprecated"),
        ("DYN_KVBM_TRANSFER_BATCH_SIZE", "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE"),
        ("DYN_KVBM_ENABLE", "naming its connector"),
    ],
)
def test_what_has_no_effect_says_so_once(name, said):
    (warning,) = from_env(**{name: "whatever"}).warnings
    assert warning.startswith(f"{name} (environment) has no effect")
    assert said in warning


@pytest.mark.parametrize(
    ("name", "closest"),
    [
        ("DYN_KVBM_CPU_CACHE_SIZE_GB", "DYN_KVBM_CPU_CACHE_GB"),
        ("DYN_KVBM_METRIC_PORT", "DYN_KVBM_METRICS_PORT"),
        ("KVBM_ONBORD", "KVBM_ONBOARD"),
        ("KVBM_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_GB"),
        ("DYN_KVMB_CPU_CACHE_GB", "DYN_KVBM_CPU_CACHE_GB"),
        ("dyn_kvbm_cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB"),
    ],
)
def test_an_unknown_variable_gets_the_closest_name(name, closest):
    got = from_env(**{name: "1"})
    assert got.warnings == (f"{name} (environment) is not a setting and is ignored; did you mean {closest}?",)
    assert got.misspelt == got.warnings


def test_an_unknown_variable_like_no_other_is_pointed_to_the_list():
    got = from_env(DYN_KVBM_Q="1")
    assert "kvbm config --all" in got.warnings[0]
    assert got.misspelt == ()


def test_variables_that_kubernetes_makes_for_a_service_are_left_alone():
    assert from_env(KVBM_METRICS_PORT="tcp://10.0.0.7:6880").warnings == ()
    assert from_env(KVBM_METRICS_PORT="6880").misspelt


@pytest.mark.parametrize("name", ["KVBM_MODEL_ID", "KVBM_SERVER_PORT", "KVBM_SERVICE_HOST", "DYN_HTTP_PORT", "HOME"])
def test_variables_of_others_are_left_alone(name):
    assert from_env(**{name: "1"}).warnings == ()


@pytest.mark.parametrize(
    ("key", "closest"),
    [
        ("cpu_cache_gbs", "cpu_cache_gb"),
        ("CPU_CACHE_GB", "cpu_cache_gb"),
        ("dyn_kvbm_cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB"),
        ("kvbm_onbord", "KVBM_ONBOARD"),
    ],
)
def test_a_slip_in_json_gets_the_closest_name(key, closest):
    (warning,) = from_extra(**{key: 1}).warnings
    assert warning == f"{key} (kv_connector_extra_config) is not a setting and is ignored; did you mean {closest}?"


@pytest.mark.parametrize(
    "key",
    [
        "connectors", "backends", "shared_storage_path", "cpu_bytes_to_use", "num_cpu_blocks", "block_size",
        "lmcache.local_cpu", "enable_cross_layers_blocks", "spec_name", "eviction_policy", "store_threshold",
    ],
)  # fmt: skip
def test_keys_of_others_in_json_are_left_alone(key):
    assert from_extra(**{key: {"anything": [1]}}).warnings == ()


def test_every_unknown_key_of_a_file_is_noticed(tmp_path):
    path = toml_file(tmp_path, "colour = 'blue'\n[cache.host]\nnum_blocks = 1\n")
    warnings = load(environ={}, files=[path]).warnings
    assert [warning.split(" is not a setting")[0] for warning in warnings] == [f"colour ({path})", f"cache ({path})"]


def test_what_is_set_but_not_used_is_collected_as_written(tmp_path):
    path = toml_file(tmp_path, "disable_write_combined = true\nnixl_backends = {posix = true}\n")
    got = load({}, {"DYN_CONNECTOR": "kvbm", "DYN_KVBM_CPU_CACHE_GB": "1"}, [path])
    assert got.unused == ("DYN_CONNECTOR", "disable_write_combined", "nixl_backends.posix")
    assert got.unused_because == {
        "DYN_CONNECTOR": ROWS["dyn_connector"].unused,
        "disable_write_combined": ROWS["disable_write_combined"].unused,
        "nixl_backends.posix": ROWS["nixl_backends"].unused,
    }


# ---- settings that depend on each other ----


def test_the_leader_needs_two_addresses():
    with pytest.raises(ConfigError) as caught:
        from_env(DYN_KVBM_LEADER_ZMQ_PUB_PORT="56002")
    said = str(caught.value)
    assert "DYN_KVBM_LEADER_ZMQ_PUB_PORT='56002' (environment)" in said
    assert "DYN_KVBM_LEADER_ZMQ_ACK_PORT=56002 (default)" in said
    assert "tcp://127.0.0.1:56002" in said
    assert "choose two different ports" in said


def test_the_port_of_the_consolidator_must_exist():
    assert from_env(DYN_KVBM_LEADER_ZMQ_PUB_PORT="64535").consolidator_port == 65535
    with pytest.raises(ConfigError) as caught:
        from_env(DYN_KVBM_LEADER_ZMQ_PUB_PORT="64536")
    assert "DYN_KVBM_LEADER_ZMQ_PUB_PORT='64536' (environment)" in str(caught.value)
    assert "65536 is above 65535; choose a port up to 64535" in str(caught.value)
    without = from_env(DYN_KVBM_LEADER_ZMQ_PUB_PORT="64536", DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR="0")
    assert without.leader_zmq_pub_port == 64536


def test_the_consolidator_on_the_port_of_another_is_noticed():
    (warning,) = from_env(DYN_KVBM_LEADER_ZMQ_PUB_PORT="5000", DYN_KVBM_LEADER_ZMQ_ACK_PORT="6000").warnings
    assert "DYN_KVBM_LEADER_ZMQ_ACK_PORT='6000'" in warning


@pytest.mark.parametrize("key", ["leader_zmq_pub_port", "leader_zmq_ack_port", "metrics_port"])
def test_a_port_below_1024_is_noticed(key):
    (warning,) = from_env(**{ROWS[key].env: "1023"}).warnings
    assert warning.startswith(f"{ROWS[key].env}='1023' (environment): ports below 1024")
    assert from_env(**{ROWS[key].env: "1024"}).warnings == ()


def test_an_ipv6_host_is_bracketed_in_addresses():
    assert from_env(DYN_KVBM_LEADER_ZMQ_HOST="fd00::1").leader_pub_url == "tcp://[fd00::1]:56001"


# ---- NIXL backends ----


def test_backends_are_switched_by_name_and_places_add_up(tmp_path):
    path = toml_file(tmp_path, "[nixl_backends]\nucx = true\nPOSIX = 'on'\n")
    got = load({}, {"DYN_KVBM_NIXL_BACKEND_UCX": "0", "DYN_KVBM_NIXL_BACKEND_gds": "yes"}, [path])
    assert got.nixl_backends == {"GDS": True, "POSIX": True, "UCX": False}
    assert got.sources["nixl_backends"] == f"{path}, environment"


@pytest.mark.parametrize("name", ["DYN_KVBM_NIXL_BACKEND_UCX_PARAM1", "DYN_KVBM_NIXL_BACKEND_GDS_MT"])
def test_parameters_of_a_backend_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}='1' .environment.: custom params not supported"):
        from_env(**{name: "1"})


def test_a_backend_needs_a_name():
    with pytest.raises(ConfigError, match="expected the name of a backend, for example DYN_KVBM_NIXL_BACKEND_UCX=1"):
        from_env(DYN_KVBM_NIXL_BACKEND_="1")


def test_a_bad_switch_of_a_backend_in_a_file_is_named():
    with pytest.raises(ConfigError, match=r"nixl_backends\.ucx='' \(kv_connector_extra_config\): expected"):
        from_extra(nixl_backends={"ucx": ""})


# ---- tiers ----


def test_without_a_tier_the_four_variables_are_named():
    with pytest.raises(ConfigError, match="At least one cache tier must be configured") as caught:
        require_tier(from_env())
    for tier in ("CPU", "DISK"):
        assert f"DYN_KVBM_{tier}_CACHE_GB" in str(caught.value)
        assert f"DYN_KVBM_{tier}_CACHE_OVERRIDE_NUM_BLOCKS" in str(caught.value)
    assert "for example DYN_KVBM_CPU_CACHE_GB=20" in str(caught.value)


@pytest.mark.parametrize("tier", ["cpu", "disk"])
@pytest.mark.parametrize(("size", "value"), [("gb", 0.5), ("override_num_blocks", 1)])
def test_a_tier_of_any_size_is_a_tier(tier, size, value):
    got = from_extra(**{f"{tier}_cache_{size}": value})
    require_tier(got)
    assert (got.has_host_tier, got.has_disk_tier) == (tier == "cpu", tier == "disk")


@pytest.mark.parametrize(
    ("gb", "override", "bytes_per_block", "slots"),
    [
        (1, 0, 1_000_000, 1000),
        (0.5, 0, 1_000_000, 500),
        (1, 1, 1_000_000, 1),
        (1, 7, 1_000_000, 7),
        (0, 7, 1_000_000, 7),
        (0, 0, 1_000_000, 0),
        (1, 0, 3_000_000, 333),
        (0.000001, 0, 1_000_000, 0),
    ],
)
def test_slots_of_a_tier(gb, override, bytes_per_block, slots):
    assert slots_for(gb, override, bytes_per_block) == slots


def test_a_block_without_bytes_is_refused():
    with pytest.raises(ValueError, match="at least one byte"):
        slots_for(1, 0, 0)


@given(st.floats(0, 10**15), st.integers(1, 2**40))
def test_slots_never_take_more_than_was_given(gb, bytes_per_block):
    slots = slots_for(gb, 0, bytes_per_block)
    assert slots * bytes_per_block <= gb * 1e9 * (1 + 1e-9)
    assert (slots + 1) * bytes_per_block >= gb * 1e9 * (1 - 1e-9)


def test_repr_has_what_was_set_and_no_more():
    assert repr(from_env(DYN_KVBM_CPU_CACHE_GB="2.5", KVBM_OFFLOAD_DECODE="0")) == (
        "Config(cpu_cache_gb=2.5, offload_decode=off)"
    )


# ---- directories ----


def test_host_memory_and_disk_are_not_kept_in_one_directory(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    both = {"disk_cache_dir": str(tmp_path), "host_persist_dir": str(tmp_path / "link"), "cpu_cache_gb": 1}
    with pytest.raises(ConfigError, match=r"host_persist_dir=.* and disk_cache_dir=.*: .* cannot use the same"):
        from_extra(**both, host_persist=True, disk_cache_gb=1)
    from_extra(**both, disk_cache_gb=1)
    from_extra(**both, host_persist=True)
    from_extra(**both | {"host_persist_dir": str(tmp_path / "other")}, host_persist=True, disk_cache_gb=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "localhost", "::1"])
def test_ranks_on_one_machine_meet_where_no_other_user_can(host, monkeypatch):
    monkeypatch.setenv("TMPDIR", "/somewhere")
    url = from_env(DYN_KVBM_LEADER_ZMQ_HOST=host, DYN_KVBM_LEADER_ZMQ_PUB_PORT="41001").leader_pub_url
    assert url == f"ipc:///somewhere/kvbm-{os.geteuid()}/leader-41001"


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "node-1"])
def test_ranks_on_several_machines_meet_on_ports(host):
    assert from_env(DYN_KVBM_LEADER_ZMQ_HOST=host).leader_pub_url == f"tcp://{host}:56001"
