"""`kvbm cache list | push | pull | verify --bucket` and `kvbm doctor`, with a real store; `kvbm cache warm`."""

from __future__ import annotations

import http.server
import json
import os
import threading
from typing import ClassVar

import pytest
from object_blocks import random_keys
from object_servers import ACCESS_KEY, SECRET_KEY
from test_object_tools import make_cache, read_cache

from kvbm.cli.main import main
from kvbm.tiers.disk.cache_dir import cache_directory
from kvbm.tiers.objects.client import Client

CIPHER = "a-cipher-secret"


@pytest.fixture
def kvbm(weed, monkeypatch, tmp_path, capfd):
    """Runs the command with the settings of the store: (exit code, all that it printed)."""
    found = weed.settings()
    for name in list(os.environ):
        if "KVBM" in name or name.startswith("AWS_"):
            monkeypatch.delenv(name)
    for name, value in {
        "DYN_KVBM_CPU_CACHE_GB": "0.1", "DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": found.bucket,
        "DYN_KVBM_OBJECT_ENDPOINT": found.endpoint, "DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY,
        "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY, "KVBM_OBJECT_ENCRYPTION_SECRET": CIPHER,
        "KVBM_OBJECT_TIMEOUT_SECS": "30",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        for secret in (SECRET_KEY, ACCESS_KEY, CIPHER):
            assert secret not in out + err
        return code, out + err

    return run


def expect(answer, code, text):
    assert text in answer[1]
    assert answer[0] == code


def test_a_cache_is_pushed_listed_verified_and_pulled(kvbm, weed, tmp_path):
    model = f"org/cli-{os.urandom(4).hex()}"
    fingerprint, keys = {"model": model, "block_size": 16}, random_keys(30)
    directory, memories = make_cache(tmp_path / "a", fingerprint, keys)
    expect(kvbm("cache", "push", directory), 0, "30 blocks pushed")
    code, text = kvbm("cache", "list")
    assert code == 0
    assert model in text
    name = next(line.split()[0] for line in text.splitlines() if model in line)
    code, text = kvbm("cache", "list", "--json")
    assert next(cache for cache in json.loads(text) if cache["fingerprint"]["model"] == model)["blocks"] == 30
    expect(kvbm("cache", "verify", "--bucket", name), 0, "60 blocks good, 0 objects bad")
    expect(kvbm("cache", "pull", tmp_path / "b", "--model", model), 0, "30 blocks pulled")
    expect(kvbm("cache", "verify", tmp_path / "b"), 0, "30 blocks good, 0 bad")
    pulled = cache_directory(tmp_path / "b", fingerprint)
    assert read_cache(pulled, keys) == [[memory[i] for i in range(30)] for memory in memories]
    listed = next(iter(Client(weed.settings()).list(f"kvbm-1/{name}/0/")))
    weed.overwrite(listed.name, weed.stored_bytes(listed.name)[:-1])
    expect(kvbm("cache", "verify", "--bucket", name), 1, "59 blocks good, 1 objects bad")


def test_errors_name_what_to_do(kvbm, monkeypatch, tmp_path):
    code, text = kvbm("cache", "pull", tmp_path, "--model", "org/none")
    assert code == 2
    assert "Name one with --cache or --model" in text
    monkeypatch.setenv("DYN_KVBM_OBJECT_SECRET_KEY", "wrong")
    code, text = kvbm("cache", "list")
    assert code == 2
    assert "the secret key is wrong (DYN_KVBM_OBJECT_SECRET_KEY)" in text
    monkeypatch.delenv("DYN_KVBM_OBJECT_BUCKET")
    code, text = kvbm("cache", "list")
    assert code == 2
    assert "DYN_KVBM_OBJECT_BUCKET is not set" in text


def findings(answer):
    return {found["name"]: found for found in json.loads(answer[1])["findings"]}


def test_the_doctor_checks_the_store(kvbm, monkeypatch):
    found = findings(kvbm("doctor", "--json"))
    good = ("objects-reachable", "objects-clock", "objects-credentials")
    assert [found[name]["level"] for name in good] == ["good"] * 3
    assert "lifecycle rule" in found["objects-capacity"]["text"]
    assert "Latency" in found["objects-speed"]["text"]
    assert "objects-plain" not in found
    monkeypatch.delenv("KVBM_OBJECT_ENCRYPTION_SECRET")
    assert "objects-plain" in findings(kvbm("doctor", "--json", "--quick"))
    monkeypatch.setenv("DYN_KVBM_OBJECT_SECRET_KEY", "wrong")
    assert findings(kvbm("doctor", "--json", "--quick"))["objects-credentials"]["level"] == "bad"
    monkeypatch.setenv("DYN_KVBM_OBJECT_ENDPOINT", "http://127.0.0.1:1")
    assert findings(kvbm("doctor", "--json", "--quick"))["objects-reachable"]["level"] == "bad"


class Engine(http.server.BaseHTTPRequestHandler):
    """As much of an OpenAI endpoint as a request for one token needs."""

    asked: ClassVar[list[dict]] = []

    def do_GET(self):
        self._answer(b'{"data": [{"id": "m"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "path": self.path})
        usage = {"prompt_tokens": 8, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        event = {"choices": [{"text": "x"}], "usage": usage}
        self._answer(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        return


@pytest.fixture
def engine():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Engine.asked.clear()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_warm_asks_for_one_token_of_every_prompt(engine, tmp_path, capsys):
    messages = [{"role": "user", "content": "hi"}]
    lines = ["a plain prompt", '"in quotes"', "[1, 2, 3]", '{"prompt": "p"}', json.dumps({"messages": messages}), ""]
    (tmp_path / "prompts").write_text("\n".join(lines))
    assert main(["cache", "warm", str(tmp_path / "prompts"), "--url", engine, "--concurrency", "1"]) == 0
    assert "5 prompts of 40 tokens" in capsys.readouterr().out
    assert [ask.get("prompt", ask.get("messages")) for ask in Engine.asked] == [
        "a plain prompt", "in quotes", [1, 2, 3], "p", messages,
    ]  # fmt: skip
    assert {ask["max_tokens"] for ask in Engine.asked} == {1}


@pytest.mark.parametrize("line", ["[1, 2", "{}", "[]", '{"prompt": [1, "a"]}', ""])
def test_warm_names_a_line_that_is_no_prompt(engine, tmp_path, capsys, line):
    (tmp_path / "prompts").write_text(line)
    assert main(["cache", "warm", str(tmp_path / "prompts"), "--url", engine]) == 2
    assert "expected text, or JSON" in capsys.readouterr().err
    assert not Engine.asked
