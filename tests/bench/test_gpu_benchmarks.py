"""The GPU benchmarks where there is no GPU: they say so, and all that does not need one is right."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvbm.bench import results as results_of

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
NAMES = (
    "records",
    "child",
    "vllm_kinds",
    "copies",
    "interference",
    "throughput",
    "ttft",
    "disk",
    "qps",
    "agents",
    "suite",
    "report",
    "sglang_prompts",
)
SCRIPTS = ("copies", "ttft", "disk", "qps", "agents", "interference", "throughput", "suite")


@pytest.fixture(scope="module")
def gpu():
    """All modules of the folder, imported as a script there would."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


def call(monkeypatch, script, *arguments):
    """The exit status of a script's main()."""
    monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *arguments])
    try:
        return script.main()
    except SystemExit as exit:
        return exit.code


# -- without a device -------------------------------------------------------------------------------------------------


def test_a_script_without_a_device_says_so_and_ends_with_3():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "copies.py")],
        capture_output=True,
        text=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "sees no CUDA device" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_leaves_without_a_device(gpu, monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(gpu.records, "why_no_device", lambda: "There is nothing to measure.")
    result = tmp_path / "result.json"
    assert call(monkeypatch, getattr(gpu, name), "--json", str(result)) == 3
    assert capsys.readouterr().err == "There is nothing to measure.\n"
    assert not result.exists()


def test_without_torch_there_is_a_sentence_too(gpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "torch cannot be imported" in gpu.records.why_no_device()


@pytest.mark.parametrize("name", [*SCRIPTS, "report", "sglang_prompts"])
def test_every_script_explains_itself(gpu, monkeypatch, capsys, name):
    assert call(monkeypatch, getattr(gpu, name), "--help") == 0
    help_text = capsys.readouterr().out
    assert getattr(gpu, name).__doc__.splitlines()[0] in help_text


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("copies", ["--programs", "0"]),
        ("copies", ["--blocks", "1"]),
        ("copies", ["--tiles", "48"]),
        ("copies", ["--layouts", "sideways"]),
        ("ttft", ["--count", "3"]),
        ("ttft", ["--lengths", "10"]),
        ("ttft", ["--kinds", "lmcache"]),  # without --peers
        ("throughput", ["--kinds", "lmcache"]),
        ("disk", ["--count", "1"]),
        ("disk", ["--kinds", "native"]),
        ("interference", ["--rounds", "0"]),
        ("qps", ["--rates", "0"]),
        ("qps", ["--users", "0"]),
        ("qps", ["--at-once", "1", "0"]),
        ("qps", ["--budget", "0"]),
        ("agents", ["--agents", "0"]),
        ("agents", ["--first", "50000"]),
        ("agents", ["--tool", "3000", "1000"]),
        ("agents", ["--think", "0"]),
        ("throughput", ["--repeats", "0"]),
        ("report", []),
        ("sglang_prompts", []),  # without --directory
        ("sglang_prompts", ["--directory", "x", "--count", "1"]),
    ],
)
def test_what_makes_no_sense_is_refused(gpu, monkeypatch, capsys, name, arguments):
    assert call(monkeypatch, getattr(gpu, name), *arguments) == 2
    assert "error:" in capsys.readouterr().err


def test_a_dry_run_leaves_out_what_needs_a_gpu(gpu, capsys):
    options = SimpleNamespace(dry=True, kinds=["base", "native", "kvbm"])
    gpu.vllm_kinds.check(options)
    assert options.kinds == ["base", "kvbm"]
    assert "only base, kvbm, packed, raw run on a CPU" in capsys.readouterr().err


# -- records ----------------------------------------------------------------------------------------------------------


def test_statistics_are_values_that_were_measured(gpu):
    median, percentile = gpu.records.median, gpu.records.percentile
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 3, 2]) == 3
    hundred = list(range(1, 101))
    assert [percentile(hundred, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7], 99) == 7
    assert percentile([1, 2, 3], 99) == 3
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_record_is_complete_after_every_row(gpu, tmp_path):
    path = tmp_path / "deep" / "result.json"
    record = gpu.records.Record("ttft", {"dry": True}, path)
    for number in range(3):
        record.add({"what": "cold", "ms": float(number)})
        written = json.loads(path.read_text())
        assert len(written["rows"]) == number + 1
    assert set(written) == {"benchmark", "taken", "command", "machine", "settings", "rows"}
    assert written["machine"]["python"] == sys.version.split()[0]
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]


# -- children ---------------------------------------------------------------------------------------------------------

CHILD = """
import sys, time
sys.path.insert(0, {folder!r})
from child import orders, run_child

def main(task, emit):
    print("a line for the log")
    if task["do"] == "count":
        for i in range(task["to"]):
            emit({{"i": i}})
    elif task["do"] == "answer":
        for order in orders():
            emit({{"double": 2 * order["number"]}})
    elif task["do"] == "fail":
        raise RuntimeError("no luck")
    elif task["do"] == "hang":
        import subprocess
        emit({{"pid": subprocess.Popen(["sleep", "60"]).pid}})
        time.sleep(60)

run_child(main)
"""


@pytest.fixture
def start(gpu, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CHILD.format(folder=str(FOLDER)))
    return lambda **task: gpu.child.Child(str(script), task, "test")


def test_a_child_sends_rows(start):
    with start(do="count", to=3) as running:
        assert list(running.rows(30)) == [{"i": 0}, {"i": 1}, {"i": 2}]


def test_a_child_takes_orders(start):
    with start(do="answer") as running:
        for number in (1, 2):
            running.send({"number": number})
            assert running.receive(30) == {"double": 2 * number}


def test_a_child_that_fails_is_heard(gpu, start):
    with (
        start(do="fail") as running,
        pytest.raises(gpu.child.ChildError, match=r"(?s)status 1.*a line for the log.*no luck"),
    ):
        list(running.rows(30))


def test_an_order_to_a_child_that_has_died_is_answered_by_the_reason(gpu, start):
    with start(do="fail") as running:
        while running.alive:
            time.sleep(0.05)
        running.send({"number": 1})
        with pytest.raises(gpu.child.ChildError, match=r"(?s)status 1.*no luck"):
            running.receive(30)


def test_a_child_that_hangs_is_ended_with_all_it_has_started(gpu, start):
    running = start(do="hang")
    pid = running.receive(30)["pid"]
    with pytest.raises(gpu.child.ChildError, match="nothing heard"), running:
        running.receive(0.2)
    for _ in range(100):
        if not _alive(pid):
            break
        time.sleep(0.05)
    assert not _alive(pid)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_a_script_that_is_no_child_goes_on(gpu, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ttft.py", "--dry"])
    assert not gpu.child.run_child(lambda task, emit: pytest.fail("not a child"))


# -- engines ----------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_the_model(gpu):
    shape = gpu.vllm_kinds.QWEN3_8B
    assert shape.token_bytes == 147_456
    # The last block holds the token whose logits are wanted: it is never loaded.
    assert shape.loaded_bytes(32_768) == 32_752 * 147_456
    assert shape.loaded_bytes(32_769) == 32_768 * 147_456


def test_kinds_differ_in_their_connector_alone(gpu):
    connector = gpu.vllm_kinds.connector
    assert connector("base", 1.5) is None
    assert connector("native", 1.5)["kv_connector_extra_config"] == {"cpu_bytes_to_use": 1_500_000_000}
    assert connector("kvbm", 1.5)["kv_connector_module_path"] == "kvbm.vllm_integration.connector"


def test_prompts_come_from_their_seed(gpu):
    draw = gpu.vllm_kinds.draw
    assert draw(random.Random(1), 50) == draw(random.Random(1), 50) != draw(random.Random(2), 50)


@pytest.mark.parametrize(("kind", "weights"), [("dense", 11), ("latent", 10)])
def test_the_model_is_written_once_and_complete(gpu, tmp_path, kind, weights):
    pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    from random_models import Dense, Latent

    shape = {
        "dense": Dense("smaller", 2, 16, 2, 1, 8, 32, 64, "float32", 32),
        "latent": Latent("smaller", 2, 16, 2, 32, 64, "float32"),
    }[kind]
    folder = gpu.vllm_kinds.model_folder(shape, tmp_path)
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(places) == 3 + weights * shape.layers
    for file in set(places.values()):
        with safetensors.safe_open(folder / file, "pt") as content:
            assert set(content.keys()) == {name for name, place in places.items() if place == file}
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == shape.layers
    before = (folder / "config.json").stat().st_mtime_ns
    assert gpu.vllm_kinds.model_folder(shape, tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["smaller"]


# -- copies -----------------------------------------------------------------------------------------------------------


def test_no_shape_of_the_kernel_is_measured_twice(gpu):
    shapes = list(gpu.copies.variants([4, 8], [16], [16, 64, 128], piece_kib=64))
    assert [tuple(shape) for shape in shapes] == [(4, 16, 16), (4, 16, 64), (8, 16, 16), (8, 16, 64)]
    assert "4 programs of 16 warps, 64 KiB" in str(shapes[1])


def test_the_kernel_has_another_shape_for_a_while(gpu):
    module = SimpleNamespace(__name__="kernels", _PROGRAMS=1, _WARPS=2, _TILE_BYTES=3)
    with gpu.copies.shaped(module, gpu.copies.Variant(8, 16, 64)):
        assert (module._PROGRAMS, module._WARPS, module._TILE_BYTES) == (8, 16, 64 << 10)
    assert (module._PROGRAMS, module._WARPS, module._TILE_BYTES) == (1, 2, 3)
    del module._WARPS
    with (
        pytest.raises(SystemExit, match="kernels has no _WARPS"),
        gpu.copies.shaped(module, gpu.copies.Variant(1, 1, 1)),
    ):
        pass


def test_the_project_has_what_the_script_uses():
    """Read from the sources, which cannot be imported without CUDA."""
    transfer = FOLDER.parents[1] / "src" / "kvbm" / "transfer"
    tree = ast.parse((transfer / "kernel_copies.py").read_text())
    constants = {node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)}
    assert {"_PROGRAMS", "_WARPS", "_TILE_BYTES"} <= constants
    (kernels,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KernelCopies"]
    methods = {node.name: node for node in kernels.body if isinstance(node, ast.FunctionDef)}
    for name, first in (("__init__", ["layout", "slab", "device"]), ("to_device", ["slots", "blocks"])):
        assert [argument.arg for argument in methods[name].args.args[1:]][: len(first)] == first
    assert [argument.arg for argument in methods["to_host"].args.args] == ["self", "slots", "blocks"]
    assert "def batch_function()" in (transfer / "cuda_calls.py").read_text()


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_the_bench_moves_blocks_through_the_projects_own_copier(gpu, layout):
    """On the CPU, which has a copier as well."""
    pytest.importorskip("torch")
    bench = gpu.copies.Bench(layout, 4096, 12, device="cpu")
    try:
        assert bench.bytes == 12 * gpu.copies.LAYERS * 4096
        assert len(bench.layout.merged()) == (gpu.copies.LAYERS if layout == "layers" else 1)
        assert bench.round_trip()
        record = gpu.records.Record("copies", {}, None)
        for way, direction, *copies in gpu.copies.ways(bench, None, []):
            what = {"layout": layout, "piece_kib": 4, "way": way, "direction": direction}
            gpu.copies.measure(record, what, bench, 3, *copies)
        assert [row["direction"] for row in record.rows] == ["to device", "to device", "to host", "both"]
        for row in record.rows:
            assert len(row["gbps"]) == len(row["issue_ms"]) == 3
            assert min(row["gbps"]) > 0
        for direction, way in (("to device", bench.copier_load), ("to host", bench.copier_store)):
            what = {"layout": layout, "piece_kib": 4, "way": "copier", "direction": direction}
            begin = partial(way, False) if direction == "to device" else way
            gpu.copies.measure_beside(record, what, bench, 3, begin)
            assert len(record.rows[-1]["alone_ms"]) == len(record.rows[-1]["beside_ms"]) == 3
            assert min(record.rows[-1]["beside_ms"]) > 0
        bench.copier.store = lambda places, slots: SimpleNamespace(wait=lambda: None)
        assert not bench.round_trip()
    finally:
        bench.close()


# -- ttft -------------------------------------------------------------------------------------------------------------


def ttft_rows(kind="kvbm", length=1000, mode="eager", factor=1.0, cached=990):
    what = {"kind": kind, "length": length, "mode": mode, "bytes": 50_000_000}
    rows = [{**what, "what": "start", "s": 12.5}]
    for prompt in range(4):
        rows.append({**what, "what": "cold", "prompt": prompt, "ms": 100.0 + prompt, "cached": 0})
        rows.append({**what, "what": "on_gpu", "prompt": prompt, "ms": 4.0 + prompt, "cached": 990})
        rows.append({**what, "what": "reference", "prompt": prompt, "ms": 9.0, "cached": 990})
    for number in (1, 2):
        for prompt in range(4):
            ms = factor * (10.0 * number + prompt)
            rows.append({**what, "what": "returned", "pass": number, "prompt": prompt, "ms": ms, "cached": cached})
    rows += [{**what, "what": "again", "prompt": p, "same": p > 0, "ms": 20.0, "cached": 990} for p in range(4)]
    rows.append({**what, "what": "tokens", "same": 3, "of": 4, "distinct": 4})
    rows.append({**what, "what": "batch", "prompts": 4, "ms": 33.0})
    return rows


BUS = {"what": "bus", "to_device_gbps": 50.0, "to_host_gbps": 49.0, "both_gbps": 90.0}


def test_times_to_first_token_are_set_beside_their_floor(gpu):
    (line,) = gpu.ttft.summarise([BUS, *ttft_rows()])
    assert line["cold_ms"] == 102.0
    assert line["returned_ms"] == 20.0
    assert line["worst_returned_ms"] == 23.0
    assert line["bus_ms"] == pytest.approx(1.0)
    assert line["floor_ms"] == line["on_gpu_ms"] == 6.0
    assert (line["same_tokens"], line["batch_ms"], line["hit_percent"], line["start_s"]) == ("3 of 4", 33.0, 99.0, 12.5)
    slow_bus = {**BUS, "to_device_gbps": 1.0}
    (line,) = gpu.ttft.summarise([slow_bus, *ttft_rows()])
    assert line["floor_ms"] == line["bus_ms"] == pytest.approx(50.0)
    assert len(gpu.ttft.show(line)) <= len(gpu.ttft.HEADER)


def test_engines_lengths_and_modes_are_kept_apart(gpu):
    rows = [BUS, *ttft_rows("base", cached=0), *ttft_rows(), *ttft_rows(length=2000), *ttft_rows(mode="graphs")]
    lines = gpu.ttft.summarise(rows)
    assert [(line["kind"], line["length"], line["mode"]) for line in lines] == [
        ("base", 1000, "eager"), ("kvbm", 1000, "eager"), ("kvbm", 2000, "eager"), ("kvbm", 1000, "graphs"),
    ]  # fmt: skip
    assert [line["hit_percent"] for line in lines] == [0.0, 99.0, 49.5, 99.0]


def test_an_engine_that_failed_has_a_line_that_says_why(gpu):
    failed = {"kind": "native", "length": 1000, "mode": "eager", "what": "failed", "why": "ended with status 1\nmore"}
    (line,) = gpu.ttft.summarise([BUS, failed])
    assert gpu.ttft.show(line).endswith("failed: ended with status 1")


def test_packed_blocks_have_a_lower_floor_and_it_is_said_why_blocks_are_not_packed(gpu):
    log = ["INFO kvbm: blocks are packed to 77 %: the GPU unpacks 430 GB/s, the bus carries 55 GB/s", "INFO more"]
    (packed,) = gpu.ttft.packing_in(log)
    (line,) = gpu.ttft.summarise([{**BUS, "to_device_gbps": 1.0}, *ttft_rows(), {**ttft_rows()[0], **packed}])
    assert line["bus_ms"] == line["floor_ms"] == pytest.approx(38.5)
    assert line["packing"] == "blocks are packed to 77 %: the GPU unpacks 430 GB/s, the bus carries 55 GB/s"
    (raw,) = gpu.ttft.packing_in(["KVBM_PACK=auto: blocks of this KV cache are not packed: its values are int32"])
    assert raw["ratio"] == 1
    assert raw["said"].endswith("int32")
    assert not gpu.ttft.packing_in(["nothing of it"])


def test_an_engine_that_fails_or_hangs_costs_the_others_nothing(gpu, monkeypatch, capsys):
    limits, calls = {}, []

    class Child:
        def __init__(self, script, task, name, path=()):
            self.name, self.task = name, task

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def receive(self, limit):
            limits[self.name] = limit
            calls.append(f"{self.name} starts")
            if self.name == "raw":
                raise gpu.child.ChildError("nothing heard of raw")
            return {"what": "start", "s": 1.0}

        def send(self, order):
            calls.append(f"{self.name} measures")

        def rows(self, limit):
            if self.name == "prepare":
                raise gpu.child.ChildError("nothing heard of prepare")
            yield from ttft_rows(self.name, self.task["length"])

        def lines_with(self, text):
            return []

    monkeypatch.setattr(gpu.ttft, "Child", Child)
    monkeypatch.setattr(gpu.ttft, "wait_for_memory", lambda: None)
    kinds = ("raw", "kvbm", "packed")
    assert call(monkeypatch, gpu.ttft, "--dry", "--kinds", *kinds, "--limit", "7", "--at-once", "2") == 1
    assert calls == ["raw starts", "kvbm starts", "kvbm measures", "packed starts", "packed measures"]
    printed = capsys.readouterr()
    _header, raw, kvbm, packed = printed.out.splitlines()
    assert packed.endswith("3 of 4")
    assert raw.endswith("failed: nothing heard of raw")
    assert kvbm.endswith("3 of 4")
    assert "nothing heard of prepare" in printed.err
    assert (limits["raw"], limits["kvbm"]) == (7, 7)


@pytest.mark.engine
@pytest.mark.long
def test_a_dry_run_goes_through(tmp_path):
    """A real vLLM on the CPU, and with it every call that the benchmark makes of it."""
    command = [sys.executable, str(FOLDER / "ttft.py"), "--dry", "--models", str(tmp_path), "--kinds", "kvbm"]
    command += [
        "--lengths",
        "256",
        "--count",
        "4",
        "--passes",
        "2",
        "--limit",
        "240",
        "--json",
        str(tmp_path / "x.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["same"] for row in rows if row["what"] == "tokens"] == [4]
    assert sum(row["what"] == "returned" for row in rows) == 4


# -- disk -------------------------------------------------------------------------------------------------------------


def disk_rows(**ms):
    """Three prompts a pass; a pass takes what is said here, in milliseconds."""
    rows = [{"kind": "base", "what": "cold", "prompt": i % 3, "ms": 1000.0 + i, "cached": 0} for i in range(6)]
    rows += [{"kind": "kvbm", "what": "cold", "prompt": i, "ms": 1010.0, "cached": 0} for i in range(3)]
    took = {"auto": 1005.0, "never": 1006.0, "always": 1500.0, "auto again": 1007.0} | ms
    for what, each in took.items():
        loaded = {"from_disk": 100 if what == "always" else 0, "given_up": 0, "disk_gbps": 3.0}
        rows += [{"kind": "kvbm", "what": what, "prompt": i, "ms": each, "same": True, **loaded} for i in range(3)]
    return rows


def test_a_prompt_from_disk_is_set_beside_the_engine_without_kvbm(gpu):
    lines = gpu.disk.summarise(disk_rows())
    assert [(line["kind"], line["pass"]) for line in lines] == [
        ("base", "cold"), ("kvbm", "cold"), *(("kvbm", what) for what in gpu.disk.PASSES)
    ]  # fmt: skip
    always = next(line for line in lines if line["pass"] == "always")
    assert always["ratio"] == pytest.approx(1500 / 1003)
    assert (always["from_disk"], always["same"], always["compared"]) == (300, 3, 3)
    assert gpu.disk.verdict(lines) == []
    assert all(gpu.disk.show(line) for line in lines)


def test_a_slow_choice_and_a_wrong_token_are_told(gpu):
    rows = disk_rows(**{"auto again": 1030.0})
    rows[-4]["same"] = False  # of "always"
    rows[-5]["same"] = None  # given up half way: not to be compared
    wrong = gpu.disk.verdict(gpu.disk.summarise(rows))
    assert len(wrong) == 2
    assert "kvbm, always: only 1 of 2 answers" in wrong[0]
    assert wrong[1].startswith("auto again: 1.027 of the time")


def test_a_disk_that_gave_nothing_is_told(gpu):
    rows = [row for row in disk_rows() if row["what"] != "always"]
    assert gpu.disk.verdict(gpu.disk.summarise(rows)) == ["nothing has come from disk"]


@pytest.mark.engine
@pytest.mark.long
def test_a_dry_run_from_disk_goes_through(tmp_path):
    command = [sys.executable, str(FOLDER / "disk.py"), "--dry", "--models", str(tmp_path), "--kinds", "kvbm"]
    command += ["--length", "256", "--limit", "240", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert [row["cached"] for row in rows if row["what"] == "never"] == [0] * 2
    always = [row for row in rows if row["what"] == "always"]
    assert [(row["cached"], row["same"]) for row in always] == [(224, True)] * 2
    assert all(row["from_disk"] >= 6 for row in always)  # host memory may still have one of the seven
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["qwen3-tiny-random-bench", "x.json"]


# -- interference -----------------------------------------------------------------------------------------------------


class Engine:
    """Answers each step with what it was given."""

    def __init__(self, *steps):
        self.steps = list(steps)

    def step(self):
        return self.steps.pop(0)


def output(name, tokens=1, at=None):
    metrics = None if at is None else SimpleNamespace(last_token_ts=at)
    return SimpleNamespace(
        request_id=name, outputs=[SimpleNamespace(token_ids=[7] * tokens)], metrics=metrics, num_cached_tokens=5
    )


def test_times_are_the_engines_own_where_it_tells_them(gpu):
    engine = Engine([output("a", at=1.5), output("b", tokens=0)], [], [output("a"), output("b", at=1.75)])
    stepper = gpu.interference.Stepper(engine, now=lambda: 99.0)
    stepper.times = {"a": [], "b": []}
    assert [stepper.step() for _ in range(3)] == [{"a"}, set(), {"a", "b"}]
    assert stepper.times == {"a": [1.5, 99.0], "b": [1.75]}
    assert stepper.cached["a"] == 5
    assert stepper.tokens == {"a": [7, 7], "b": [7]}


def test_waiting_for_an_engine_has_an_end(gpu):
    clock = iter(range(100))
    stepper = gpu.interference.Stepper(Engine(*[[]] * 50), now=lambda: next(clock))
    with pytest.raises(TimeoutError, match="within 10 s"):
        stepper.step_until(lambda: False, 10)


def test_gaps_belong_to_the_later_token(gpu):
    times = {"a": [1.0, 2.0, 4.0, 5.0], "b": [1.5, 3.0]}
    assert sorted(gpu.interference.gaps(times, 2.0, 4.0)) == [1500.0, 2000.0]


def test_vllm_is_asked_until_its_cache_is_empty(gpu, monkeypatch):
    monkeypatch.setattr(gpu.vllm_kinds, "as_prompt", list)
    monkeypatch.setattr(gpu.vllm_kinds, "greedy", lambda tokens: tokens)
    answers = iter([False, False, True])
    llm = SimpleNamespace(reset_prefix_cache=lambda: next(answers), generate=lambda *_, **__: None)
    gpu.interference.forget(llm, random.Random(1))
    stuck = SimpleNamespace(reset_prefix_cache=lambda: False, generate=lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="still in use"):
        gpu.interference.forget(stuck, random.Random(1))


def interference_rows(kind="kvbm", during=(10.0, 11.0, 12.0)):
    what = {"kind": kind, "mode": "graphs", "what": "onboarding", "cached": 990, "engine_ms": 80.0}
    return [
        {**what, "round": i, "ttft_ms": 90.0 + i, "with_ms": list(during), "without_ms": [10.0, 10.0]}
        for i in (1, 2, 3)
    ]


def test_what_the_others_notice(gpu):
    (line,) = gpu.interference.summarise(interference_rows())
    assert (line["without_p99_ms"], line["with_p50_ms"], line["with_p99_ms"]) == (10.0, 11.0, 12.0)
    assert line["p99_raised_percent"] == pytest.approx(20.0)
    assert (line["rounds"], line["with_gaps"], line["without_gaps"], line["ttft_ms"]) == (3, 9, 6, 92.0)
    assert line["stretch_raised_percent"] is None  # not in older files
    assert line["same"] is None  # nor is this
    assert len(gpu.interference.show(line)) <= len(gpu.interference.HEADER)


def test_a_prompt_is_answered_alike_whether_it_was_brought_back_or_kept(gpu):
    rows = [{**row, "token": row["round"]} for row in interference_rows()]
    kept = [{**row, "what": "on the GPU", "token": token} for row, token in zip(rows, (1, 9), strict=False)]
    (line,) = gpu.interference.summarise(rows + kept)
    assert line["same"] == "1 of 2"
    assert gpu.interference.show(line).endswith("1 of 2")


@pytest.mark.parametrize(("during", "raised"), [([15.0, 16.0], 0.0), ([50.0, 50.0, 50.0], 150.0)])
def test_over_a_stretch_of_steps_one_slow_one_in_a_hundred_is_nobodys_business(gpu, during, raised):
    quiet = [10.0] * 196 + [20.0] * 4
    rows = [{**row, "quiet_steps_ms": quiet, "steps_ms": during} for row in interference_rows()]
    (line,) = gpu.interference.summarise(rows)
    assert line["stretch_raised_percent"] == pytest.approx(raised)
    assert line["on_gpu_stretch_raised_percent"] is None


# -- throughput -------------------------------------------------------------------------------------------------------


def throughput_rows():
    rows = []
    for number, (base, ours) in enumerate([(9.0, 9.0), (1.0, 1.0), (2.0, 2.1), (1.0, 1.01)]):
        pair = [("base", base), ("kvbm", ours)]
        # The order changes from round to round; who came first in the first is what the others are compared with.
        for kind, seconds in pair if number % 2 == 0 else pair[::-1]:
            row = {
                "kind": kind,
                "round": number,
                "what": "run",
                "s": seconds,
                "made": 100,
                "computed": 900,
                "cached": 0,
            }
            rows.append(row)
    return rows


def test_repeats_are_compared_round_by_round(gpu):
    base, ours = gpu.throughput.summarise(throughput_rows())
    assert (base["kind"], base["repeats"], base["s"], base["change_percent"]) == ("base", 3, 1.0, 0.0)
    assert ours["changes_percent"] == [0.0, -4.76, -0.99]
    assert ours["change_percent"] == pytest.approx(-0.99, abs=0.01)


def test_a_run_that_was_cut_short_can_still_be_read(gpu):
    assert gpu.throughput.summarise(throughput_rows()[:2]) == []
    assert gpu.interference.summarise([]) == gpu.ttft.summarise([BUS]) == []


# -- rates ------------------------------------------------------------------------------------------------------------


def qps_rows():
    common = {
        "what": "rate", "ttft_p50": 0.2, "ttft_p99": 0.9, "requests_per_second": 1.0, "cached_percent": 80.0, "late": 0,
        "failed": 0, "unfinished": 1, "gap_mean": 0.02,
    }  # fmt: skip
    rows = [{"what": "model", "folder": "m"}, {"kind": "base", "what": "start", "s": 40.0}]
    rows += [{**common, "kind": "base", "qps": qps, "ttft_mean": mean} for qps, mean in ((1.0, 0.6), (2.0, 3.0))]
    rows += [{**common, "kind": "kvbm", "qps": qps, "ttft_mean": mean} for qps, mean in ((1.0, 0.2), (2.0, None))]
    return rows


def test_kinds_are_compared_rate_by_rate(gpu):
    lines = gpu.qps.summarise(qps_rows())
    faster = [line["faster"] for line in lines]
    assert faster[:2] == [1.0, 1.0]
    assert faster[2] == pytest.approx(3.0)
    assert faster[3] is None
    assert all(len(gpu.qps.show(line)) == len(gpu.qps.HEADER) for line in lines)
    assert gpu.qps.summarise([]) == []


RATES = [1.0, 1.5, 2.0, 3.0, 0.5, 4.0]


@pytest.mark.parametrize(("room", "found"), [(11, 0), (14, 0), (16, 100)])
def test_no_user_is_still_in_a_cache_that_is_smaller_than_all_of_them(gpu, room, found):
    """From the first question of every rate on: who is asked for was always used longest ago."""
    shape = gpu.qps.Shape(time=15)
    recent: list[int] = []
    hits = 0

    def use(user):
        nonlocal hits
        hits += user in recent
        recent[:] = [*[other for other in recent if other != user][-room + 1 :], user]

    for user in gpu.qps.filling_order(shape, RATES):
        use(user)
    assert hits == 0
    for qps in RATES:
        whole = gpu.qps.whole_rounds(shape, qps)
        workload = gpu.qps.MultiRound(whole, qps)
        for tick in range(int(whole.time * 50)):
            for ask in workload.due(tick / 50):
                use(ask.user)
                ask.done(gpu.qps.Answer(user=0, round=0, started=0.0, finished=0.0))
    assert hits >= found
    assert found or not hits


def test_everybody_who_asks_was_filled_in(gpu):
    shape = gpu.qps.Shape(time=15)
    users = gpu.qps.filling_order(shape, RATES)
    assert len(users) == len(set(users))
    assert {user for qps in RATES for user in gpu.qps.askers(gpu.qps.whole_rounds(shape, qps), qps)} == set(users)


def test_a_rate_lasts_for_whole_rounds_of_all_users(gpu):
    shape = gpu.qps.Shape(num_users=15, time=15)
    assert [gpu.qps.whole_rounds(shape, qps).time for qps in RATES] == [15, 20, 15, 15, 30, 15]


class FakeServers:
    """Servers that start in 30 s and take what is said for each rate; time passes only when they say so."""

    def __init__(self, gpu, monkeypatch, means, sick=()):
        self.now, self.running, self.most, self.tried, self.asked = 0.0, set(), 0, [], []
        fake = self

        class Child:
            def __init__(self, script, task, name):
                self.kind = task["kind"]
                fake.running.add(self.kind)
                fake.tried.append(self.kind)
                fake.most = max(fake.most, len(fake.running))

            def __enter__(self):
                return self

            def __exit__(self, *exception):
                self.kill()

            def kill(self):
                fake.running.discard(self.kind)

            def lines_with(self, text):
                return ["kvbm: blocks are packed to 77 %: it is faster"] if self.kind == "kvbm" else []

            end = kill

        def ready(endpoint, server, seconds):
            fake.now += 30
            if server.kind in sick and (len(fake.running) > 1 or "always" in sick):
                raise gpu.qps.ChildError("no memory")

        def run(target, workload, qps, patience):
            assert target.name in fake.running
            fake.now += workload.seconds
            fake.asked.append((qps, target.name))
            summary = msgspec.structs.replace(results_of.summarise([]), ttft_mean=means[target.name](qps))
            return results_of.Run(target=target.name, url="", qps=qps, summary=summary, samples=[])

        monkeypatch.setattr(gpu.qps, "Child", Child)
        monkeypatch.setattr(gpu.qps, "wait_until_healthy", ready)
        monkeypatch.setattr(gpu.qps, "wait_for_memory", lambda: None)
        monkeypatch.setattr(gpu.qps, "fill", lambda *a: 10.0)
        monkeypatch.setattr(gpu.qps.Endpoint, "ask", lambda *a: None)
        monkeypatch.setattr(gpu.qps, "run", run)
        monkeypatch.setattr(gpu.qps, "time", SimpleNamespace(monotonic=lambda: fake.now))


def sweep(gpu, deadline, **more):
    options = SimpleNamespace(
        **{"kinds": ["base", "native", "kvbm"], "rates": [1.0, 1.5, 2.0, 3.0], "at_once": [2], "enough": 3.0, **more},
        limit=600.0, patience=20.0, least=0,
    )  # fmt: skip
    record = gpu.records.Record("qps", {}, None)
    sweep = gpu.qps.Sweep(options, {}, gpu.qps.Shape(time=15), record, deadline)
    sweep.run()
    done = {
        kind: [row["qps"] for row in record.rows if row["what"] == "rate" and row["kind"] == kind] for kind in KINDS
    }
    return sweep.failures, done, record.rows


KINDS = ("base", "native", "kvbm")
FAST = dict.fromkeys(KINDS, lambda qps: 0.1)


def test_a_kind_that_cannot_keep_up_is_asked_no_faster(gpu, monkeypatch, capsys):
    FakeServers(gpu, monkeypatch, {**FAST, "base": lambda qps: 5.0 if qps > 1 else 1.0})
    failures, done, rows = sweep(gpu, 1e9, rates=[1.0, 1.5, 2.0, 3.0, 0.5])
    assert (failures, done["base"], done["kvbm"]) == (0, [1.0, 1.5, 0.5], [1.0, 1.5, 2.0, 3.0, 0.5])
    assert [row["qps"] for row in rows if row["what"] == "left out"] == [2.0, 3.0]
    assert "left out: slower than --enough at 1.5 requests/s" in capsys.readouterr().out


@pytest.mark.parametrize("budget", [150, 250, 400])
def test_no_more_time_is_spent_than_there_is(gpu, monkeypatch, budget):
    servers = FakeServers(gpu, monkeypatch, FAST)
    failures, done, rows = sweep(gpu, budget)
    assert servers.now <= budget
    assert not failures
    assert {row["why"] for row in rows if row["what"] == "left out"} <= {"no time left"}
    assert bool(done["base"] and done["native"] and done["kvbm"]) == (budget > 150)


def test_servers_side_by_side_take_turns_at_every_rate(gpu, monkeypatch):
    servers = FakeServers(gpu, monkeypatch, {**FAST, "base": lambda qps: 5.0 if qps > 1 else 1.0})
    failures, _, rows = sweep(gpu, 1e9, at_once=[3])
    assert (failures, servers.most) == (0, 3)
    assert servers.asked == [
        (1.0, "base"), (1.0, "native"), (1.0, "kvbm"), (1.5, "native"), (1.5, "kvbm"), (1.5, "base"),
        (2.0, "native"), (2.0, "kvbm"), (3.0, "kvbm"), (3.0, "native"),
    ]  # fmt: skip
    assert [row["ratio"] for row in rows if row["what"] == "packing"] == [0.77]


@pytest.mark.parametrize("budget", [200, 240, 280])
def test_a_rate_that_does_not_fit_for_all_is_left_out_for_all(gpu, monkeypatch, budget):
    servers = FakeServers(gpu, monkeypatch, FAST)
    _, done, rows = sweep(gpu, budget, at_once=[3])
    assert servers.now <= budget
    assert done["base"] == done["native"] == done["kvbm"]
    assert 0 < len(done["kvbm"]) < 4
    assert {row["why"] for row in rows if row["what"] == "left out"} == {"no time left"}


def test_a_server_that_cannot_be_filled_costs_the_others_nothing(gpu, monkeypatch):
    servers = FakeServers(gpu, monkeypatch, FAST)

    def fill(endpoint, shape, users):
        if len(servers.filled) == 1:
            servers.filled.append("failed")
            raise gpu.child.ChildError("first requests failed")
        servers.filled.append("filled")
        return 1.0

    servers.filled = []
    monkeypatch.setattr(gpu.qps, "fill", fill)
    failures, done, _ = sweep(gpu, 1e9, at_once=[3])
    assert (failures, done["native"]) == (1, [])
    assert done["base"] == done["kvbm"] == [1.0, 1.5, 2.0, 3.0]


def test_groups_have_the_sizes_that_are_given(gpu):
    grouped = gpu.qps.grouped
    assert grouped(["a", "b", "c"], [1]) == [["a"], ["b"], ["c"]]
    assert grouped(["a", "b", "c"], [1, 2]) == [["a"], ["b", "c"]]
    assert grouped(["a", "b", "c", "d"], [2]) == [["a", "b"], ["c", "d"]]


def test_a_low_rate_lasts_until_enough_is_asked(gpu):
    shape = gpu.qps.Shape(num_users=10, time=10)
    assert [gpu.qps.whole_rounds(shape, qps, 20).time for qps in (0.5, 1, 2, 4)] == [40, 20, 10, 10]


def test_kinds_are_compared_question_by_question(gpu):
    def rate(kind, qps, ttfts):
        return {"what": "rate", "kind": kind, "qps": qps, "ttfts": list(ttfts.values()), "questions": list(ttfts)}

    rows = [
        rate("native", 2.0, {"1.1": 0.3, "2.1": 0.4, "3.1": 9.0}),
        rate("kvbm", 2.0, {"2.1": 0.2, "1.1": 0.35, "4.1": 0.1}),
        rate("kvbm", 1.0, {"1.1": 0.1}),
    ]
    (line,) = gpu.qps.pairs(rows, "kvbm", "native")
    assert (line["qps"], line["of"], line["sooner"]) == (2.0, 2, 1)
    assert line["mean"] == pytest.approx(0.075)
    assert (line["low"], line["high"]) == pytest.approx((-0.05, 0.2))
    assert "in 1 of 2 answers, by 75 ms (-50 to 200)" in gpu.qps.show_pair(line)
    assert gpu.qps.pairs(qps_rows(), "kvbm", "base") == []  # of before questions were written down


def test_servers_are_started_side_by_side_and_nobody_stays(gpu, monkeypatch):
    servers = FakeServers(gpu, monkeypatch, FAST)
    sweep(gpu, 1e9)
    assert (servers.most, servers.running) == (2, set())


def test_who_cannot_start_in_company_is_tried_alone(gpu, monkeypatch):
    servers = FakeServers(gpu, monkeypatch, FAST, sick={"native"})
    failures, done, _ = sweep(gpu, 1e9)
    assert (failures, servers.tried) == (0, ["base", "native", "kvbm", "native"])
    assert done["native"] == done["base"]
    servers = FakeServers(gpu, monkeypatch, FAST, sick={"native", "always"})
    failures, done, rows = sweep(gpu, 1e9)
    assert (failures, done["native"]) == (1, [])
    assert [row["what"] for row in rows if row["kind"] == "native"] == ["tried again alone", "failed"]


def test_every_token_is_a_word_that_comes_back_as_itself(gpu):
    words = [gpu.qps.word(number) for number in range(30, 152_000)]
    assert len(set(words)) == len(words)
    assert all(word.isalpha() for word in words[::1000])


def test_the_tokenizer_takes_a_word_for_a_token(gpu, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = gpu.qps.write_tokenizer(gpu.vllm_kinds.TINY, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    shape = gpu.qps.Shape(shared_system_prompt=50, user_history_prompt=200)
    seven, eight = (tokenizer.encode(gpu.qps.opening(user, shape)) for user in (7, 8))
    assert len(seven) == pytest.approx(250, abs=20)
    assert tokenizer.unk_token_id not in seven
    assert seven != eight
    answer = [1000, 151_000, 77, 5]
    assert tokenizer.encode(tokenizer.decode(answer)) == answer
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi hi"}], tokenize=False)
    assert chat.strip() == "hi hi"


# -- agents -----------------------------------------------------------------------------------------------------------

LOOP = {"agents": 4, "first": 200, "last": 500, "least_tool": 20, "most_tool": 60, "answer": 8, "think": 0.01}


class Answering:
    """An endpoint that answers at once, and remembers what it was asked; all it says is its own number."""

    def __init__(self, gpu, number=7):
        self._answer = gpu.agents.Answer
        self.number = number
        self.asked = {}

    def ask(self, prompt, most, user, number, epoch):
        self.asked.setdefault(user, []).append(list(prompt.tokens))
        tokens = [self.number] * (most - 1)  # one less: not every server tells of each
        length = len(prompt.tokens)
        return self._answer(
            user=user, round=number, started=0.0, finished=1.0, ttft=0.5 if number else 9.0, prompt_tokens=length,
            cached_tokens=length if number else 0, output_tokens=most, gaps=[0.02], tokens=tokens, text="x",
        )  # fmt: skip


def loop_of(gpu, turns, number=7):
    """An agent's turns, one by one."""
    shape = gpu.agents.Shape(**LOOP)
    endpoint, agent = Answering(gpu, number), gpu.agents.Agent(1, shape)
    first = agent.known()
    made = [agent.ask(endpoint, 0.0) for _ in range(turns)]
    return first, endpoint.asked[1], made


def test_a_context_grows_by_what_tools_and_the_model_say_until_the_agent_ends(gpu):
    first, asked, turns = loop_of(gpu, 20)
    assert len(first) == 275
    ends = 0
    for before, after, turn in zip([first, *asked], asked, turns, strict=False):
        if not turn.number:
            ends += 1
            assert len(after) == 200
            continue
        assert after[: len(before)] == before
        grown = after[len(before) :]
        answer = grown[:7] if before is not first else []
        assert set(answer) <= {7}
        assert 20 <= len(grown) - (8 if before is not first else 0) <= 60
    assert ends
    assert max(map(len, asked)) <= 500


def test_every_kind_gets_the_same_agents(gpu):
    """All but the tokens of the answers."""
    mine, others = (loop_of(gpu, 20, number)[1] for number in (7, 8))
    assert [[8 if token == 7 else token for token in prompt] for prompt in mine] == others
    starts = {tuple(gpu.agents.Agent(place, gpu.agents.Shape(**LOOP)).known()) for place in range(4)}
    assert sorted(map(len, starts)) == [200, 275, 350, 425]


def test_all_agents_live_until_the_end_and_their_first_turns_are_left_out(gpu):
    loop = gpu.agents.Loop(Answering(gpu), gpu.agents.Shape(**LOOP))
    loop.fill()
    assert loop.run(1.0, 60) == 0
    assert {turn.agent for turn in loop.turns} == {0, 1, 2, 3}
    row = gpu.agents.of_turns(loop.turns, unfinished=2)
    assert row["ttft_mean"] == row["ttft_p99"] == 0.5
    assert row["cached_percent"] == 100
    assert row["first_turns"] == sum(not turn.number for turn in loop.turns)
    assert row["first_turns"] + len(row["ttfts"]) == len(loop.turns) == row["answered"]
    assert (row["unfinished"], row["gap_p99"]) == (2, 0.02)
    lines = gpu.agents.summarise([{"kind": "base", "what": "agents", **row, "ttft_mean": 1.0},
                                  {"kind": "kvbm", "what": "agents", **row}])  # fmt: skip
    assert [line["faster"] for line in lines] == [1.0, 2.0]
    assert all(len(gpu.agents.show(line)) == len(gpu.agents.HEADER) for line in lines)


def test_no_context_is_longer_than_the_server_takes(gpu, monkeypatch):
    """The longest is one that was computed beforehand and has had its first tool."""
    monkeypatch.setattr(gpu.vllm_kinds, "draw", lambda source, length: [0] * length)
    seen = {}

    class StopError(Exception):
        pass

    def prepare(script, task, name):
        seen.update(task)
        raise StopError

    monkeypatch.setattr(gpu.agents, "Child", prepare)
    monkeypatch.setattr(gpu.vllm_kinds, "check", lambda options: None)
    with pytest.raises(StopError):
        call(monkeypatch, gpu.agents)
    shape = gpu.agents.Shape(16, 20_000, 50_000, 1000, 3000, 100, 4.0)
    longest = 0
    for place in range(16):
        agent = gpu.agents.Agent(place, shape)
        agent._source = SimpleNamespace(randint=lambda least, most: most)
        agent.known()
        longest = max(longest, len(agent.context))
    assert longest > shape.last
    assert longest + shape.answer <= seen["length"]


def test_a_first_context_that_cannot_be_computed_is_told(gpu):
    class Refusing:
        def ask(self, *what):
            return gpu.agents.Answer(user=0, round=0, started=0.0, finished=0.0, error="too long")

    with pytest.raises(gpu.child.ChildError, match="4 of 4 first requests failed: too long"):
        gpu.agents.Loop(Refusing(), gpu.agents.Shape(**LOOP)).fill()


# -- prompts of SGLang ------------------------------------------------------------------------------------------------


def sglang_rows(**changed):
    """Milliseconds, tokens from the storage and whether tokens are the same, of three prompts each."""
    said = {
        ("hicache", "cold"): (500, 0, True), ("hicache", "returned"): (90, 0, True),
        ("file", "cold"): (505, 0, True), ("file", "returned"): (900, 960, True),
        ("kvbm", "cold"): (505, 0, True), ("kvbm", "returned"): (300, 960, True),
        ("kvbm", "restarted"): (310, 960, True), ("kvbm", "flipped"): (520, 0, True),
        ("slow", "cold"): (505, 0, True), ("slow", "returned"): (507, 0, True),
    }  # fmt: skip
    said |= {tuple(name.split("_")): what for name, what in changed.items()}
    return [
        {"kind": kind, "what": what, "ms": ms + i, "from_storage": stored, "same": same, "tokens": [i]}
        for (kind, what), (ms, stored, same) in said.items() for i in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, None),
        ({"slow_returned": (520, 0, True)}, r"slow: returned prompts take 1\.030 of the time"),
        ({"kvbm_returned": (500, 960, True)}, r"kvbm: 1\.80 times as fast as SGLang's file backend"),
        ({"kvbm_returned": (300, 960, False)}, "kvbm: 0 of 3 answers that were returned are as before"),
        ({"kvbm_returned": (300, 960, False), "hicache_returned": (90, 0, False)}, None),  # no fault of the storage
        ({"kvbm_flipped": (520, 0, False)}, "kvbm: 0 of 3 answers that were flipped"),
        ({"kvbm_flipped": (520, 960, True)}, "pages with a flipped bit were loaded"),
        ({"kvbm_restarted": (310, 0, True)}, "after the restart only"),
        ({"kvbm_returned": (300, 0, True)}, "hardly anything has come from the storage"),
    ],
)
def test_what_sglang_and_kvbm_do_is_judged(gpu, changed, text):
    wrong = gpu.sglang_prompts.verdict(sglang_rows(**changed), 1024, dry=False)
    assert len(wrong) == (text is not None)
    assert text is None or re.search(text, wrong[0])


def test_a_dry_run_of_sglang_judges_no_times(gpu):
    rows = sglang_rows(slow_returned=(900, 0, True), file_returned=(10, 960, True))
    assert gpu.sglang_prompts.verdict(rows, 1024, dry=True) == []
    loaded = sglang_rows(slow_returned=(100, 960, True))
    assert gpu.sglang_prompts.verdict(loaded, 1024, dry=True) == ["slow: pages were loaded that are computed sooner"]


def test_every_page_gets_a_flipped_bit(gpu, tmp_path):
    (tmp_path / "cache").mkdir()
    slab = tmp_path / "cache" / "rank-0.slab"
    slab.write_bytes(bytes(4 * 4096))
    assert gpu.sglang_prompts.flip(tmp_path, 4096) == 4
    assert [page.count(1) for page in (slab.read_bytes()[at : at + 4096] for at in range(0, 4 * 4096, 4096))] == [1] * 4


# -- the report -------------------------------------------------------------------------------------------------------


def copies_rows():
    what = {"layout": "layers", "piece_kib": 64}
    return [
        {"way": "plain", "to_device_gbps": 55.5, "to_host_gbps": 55.3, "both_gbps": 101.7},
        {**what, "way": "round trip", "blocks": 2048, "equal": True},
        {**what, "way": "copier", "direction": "to device", "gbps": [50.0, 51.0, 52.0], "issue_ms": [1.0, 1.1, 1.2]},
        {**what, "way": "copier", "direction": "both", "gbps": [90.0], "issue_ms": [1.0]},
        {**what, "way": "copier", "direction": "to host", "alone_ms": [0.1, 0.2, 0.3], "beside_ms": [1.0, 9.5, 2.0]},
    ]


QPS_SETTINGS = dict.fromkeys(("users", "shared", "history", "answer", "rounds", "cache_tokens", "gb", "seconds"), 1)
QPS_SETTINGS["mode"] = "eager"
RESULTS = {
    "ttft": ({"dry": False}, lambda: [BUS, *ttft_rows("base", factor=10), *ttft_rows()]),
    "disk": ({"length": 32768, "dry": False}, disk_rows),
    "interference": ({"others": 16, "length": 32768, "dry": False}, interference_rows),
    "throughput": ({"requests": 64, "inputs": 2048, "outputs": 128, "dry": False}, throughput_rows),
    "copies": ({}, copies_rows),
    "qps": ({**QPS_SETTINGS, "dry": False}, qps_rows),
    "agents": (
        {**dict.fromkeys(("agents", "first", "last", "tool", "think"), 1), **QPS_SETTINGS, "dry": False},
        lambda: [{"kind": "kvbm", "what": "agents", "ttft_mean": 0.2, "gap_p99": 0.04, "ttfts": [0.1, 0.3]}],
    ),
}


@pytest.fixture
def results(tmp_path):
    paths = []
    for i, (name, (settings, rows)) in enumerate(RESULTS.items()):
        record = {
            "benchmark": name, "taken": f"2026-03-0{min(i, 3) + 1}T10:00", "command": [f"{name}.py", "--json", "x"],
            "machine": {"gpu": "NVIDIA H200", "vllm": "0.26.0", "kvbm": None}, "settings": settings, "rows": rows(),
        }  # fmt: skip
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(record))
    return paths


def report(gpu, *arguments):
    return gpu.report.main([str(argument) for argument in arguments])


def test_a_page_has_every_result_and_the_date_it_was_taken(gpu, results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(gpu, *results, "--out", tmp_path) == 0
    page = (tmp_path / "2026-03-04.md").read_text()
    assert page.startswith("# Results of 2026-03-04\n\ngpu NVIDIA H200, vllm 0.26.0\n")
    for title in gpu.report.TITLES.values():
        assert f"## {title}" in page
    assert "| 1000 | eager | kvbm | 102.0 | 6.0 | 20.0 | 23.0 | 6.0 | 33.0 | 99.0 | 3 of 4 | 12.5 |" in page
    assert "- 1000 eager kvbm: 10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 23.0" in page
    assert "| graphs | kvbm | 10.0 | 11.0 | 10.0 | – | 12.0 | 12.0 | 20.0 | – | – | 92.0 | 990 | – | 3 |" in page
    assert "| kvbm | 1.010 | 990 | -0.99 | +0.00, -4.76, -0.99 | 0 |" in page
    assert "| copier | layers, 64 KiB | to device | 51.0 | 50.0 to 52.0 | 1.10 |" in page
    assert "| copier | layers, 64 KiB | to host | 0.20 | 2.00 | 9.50 |" in page
    assert "2048 blocks (layers, 64 KiB) out and in again: every byte came back." in page
    assert "| 1 | kvbm | 0.200 | 0.200 | 0.900 | 1.00 | 0.0200 | – | 80 | 0 | 0 | 1 | 3.0 |" in page
    assert "| kvbm | 0.200 | – | – | – | 0.0400 | – | – | – | – | – | 1.0 |" in page
    assert "| kvbm | always | 1500.0 | 1500.0 | 1500.0 | 1.496 | 300 | 0 | 3.0 | 3 | 3 |" in page
    assert "[ttft.json](ttft.json)" in page
    assert "![" not in page


def test_each_result_has_a_plot(gpu, results, tmp_path):
    pytest.importorskip("matplotlib")
    second = tmp_path / "second.json"
    second.write_text(results[0].read_text())
    assert report(gpu, *results, second, "--out", tmp_path / "out") == 0
    pictures = sorted(path.name for path in (tmp_path / "out").glob("*.png"))
    assert pictures == [
        "2026-03-04-agents.png", "2026-03-04-copies.png", "2026-03-04-disk.png", "2026-03-04-interference.png",
        "2026-03-04-qps.png", "2026-03-04-throughput.png", "2026-03-04-ttft-2.png", "2026-03-04-ttft.png",
    ]  # fmt: skip
    page = (tmp_path / "out" / "2026-03-04.md").read_text()
    assert all(f"({name})" in page for name in pictures)


def test_what_failed_is_on_the_page(gpu, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    what = {"kind": "native", "mode": "eager", "what": "failed", "why": "ended with status 1\nand more"}
    for name, rows in {
        "ttft": [BUS, {**what, "length": 1000}],
        "interference": [what],
        "throughput": [what],
        "qps": [what, {"kind": "kvbm", "what": "left out", "qps": 4.0, "why": "no time left"}],
        "copies": [{"layout": "layers", "piece_kib": 64, "way": "round trip", "blocks": 9, "equal": False}],
    }.items():
        record = {"benchmark": name, "taken": "2026-03-01T", "machine": {}, "settings": RESULTS[name][0], "rows": rows}
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    assert report(gpu, *tmp_path.glob("*.json"), "--out", tmp_path) == 0
    page = (tmp_path / "2026-03-01.md").read_text()
    assert page.count("ended with status 1") == 4
    assert "Left out: kvbm at 4 requests/s: no time left." in page
    assert "**NOT every byte came back**" in page


def test_a_dry_run_is_called_one(gpu, results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = json.loads(results[0].read_text())
    results[0].write_text(json.dumps({**record, "settings": {"dry": True}}))
    report(gpu, results[0], "--out", tmp_path)
    assert "the times mean nothing" in (tmp_path / "2026-03-01.md").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("nothing", "cannot be read"),
        ("[]", "is no result"),
        ('{"benchmark": "ttft"}', "lacks taken, machine, settings, rows"),
        ('{"benchmark": "x", "taken": "", "machine": {}, "settings": {}, "rows": []}', "'x' is none of ttft"),
    ],
)
def test_a_foreign_file_is_refused(gpu, tmp_path, capsys, content, reason):
    path = tmp_path / "foreign.json"
    path.write_text(content)
    assert report(gpu, path, "--out", tmp_path) == 2
    message = capsys.readouterr().err
    assert str(path) in message
    assert reason in message


def test_an_engine_of_sglang_that_fails_does_not_end_the_others(tmp_path):
    """Without SGLang none of them starts."""
    (tmp_path / "sglang.py").write_text("raise ImportError('not here')\n")
    command = [
        sys.executable,
        str(FOLDER / "sglang_prompts.py"),
        "--dry",
        "--kinds",
        "hicache",
        "kvbm",
        "--at-once",
        "2",
    ]
    command += [
        "--models",
        str(tmp_path),
        "--directory",
        str(tmp_path / "pages"),
        "--json",
        str(tmp_path / "rows.json"),
    ]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1, done.stderr
    assert "not all is well" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["kind"], row["what"]) for row in rows[1:]] == [("hicache", "failed"), ("kvbm", "failed")]
    assert all("not here" in row["why"] for row in rows[1:])
