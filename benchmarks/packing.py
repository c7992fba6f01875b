"""How well real KV packs, and how fast numpy does it.

    python benchmarks/packing.py [--json FILE] [--tokens 1024] [--disk DIRECTORY [--rounds 30] [--only-disk]]
                                 [--kv FILE]

SmolLM2-135M-Instruct reads the project's documentation and source, 1,024 tokens at a time; its K (after RoPE) and V, 30
layers, in blocks of 16 tokens as vLLM lays them out, are packed and unpacked. `--kv` keeps this KV for another run and
for benchmarks/gpu/packing.py. Prints a JSON line for each figure:

    ratio, escapes       of KVBM's format, and how many blocks do not fit
    outliers             share of tiles that do not fit, of made-up K with so many channels of every head 4 to 256 times
                         as large as the others, turned as RoPE does; the median of eight models
    groups               the format with other groups, and with one base a group in place of two. A group is of
                         neighbouring values of a token, as in the format, or of a channel, whose tokens then lie side
                         by side. Escapes, bytes by raw bytes that hold the worst tile, and blocks that do not fit in
                         KVBM's slots; of real KV, of the same with outlier channels, and of made-up K
    further              what other codes would need, in bits a value: three bits and a second level of codes for the
                         rest, and the entropy of the exponents, which no code goes below
    numpy                gigabytes of raw KV a second on one core; a CPU engine's blocks are packed at that rate
    disk                 bytes and time of packed blocks by those of raw ones, where the disk tier writes and reads 200
                         blocks of Qwen3-8B's shape (36 layers, 8 heads of 128, 16 tokens); time is the median of the
                         ratios of all rounds, with its interval of 95 %
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT / "src")]

from kvbm.tiers.disk.file import DiskFile  # noqa: E402
from kvbm.transfer.packing import ABOVE_MEAN, ESCAPE, GROUP, NEAR, Tile, pack, unpack  # noqa: E402

BLOCK = 16  # tokens
CONTEXT = 1024  # tokens that the model reads at a time
BLOCKS_ON_DISK = 200
lines: list[dict[str, object]] = []


def tell(**figures: object) -> None:
    lines.append(figures)
    print(json.dumps(figures), flush=True)


def real_kv(tokens: int) -> np.ndarray:
    """uint16[layers, blocks, K or V, tokens of a block, heads, channels]"""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, str(PROJECT / "scripts" / "models.py"), "smollm2"]
    path = subprocess.check_output(command, text=True).strip()
    files = sorted((PROJECT / "docs").glob("*.md")) + sorted((PROJECT / "src").rglob("*.py"))
    text = "\n".join(file.read_text() for file in files)
    ids = AutoTokenizer.from_pretrained(path)(text[: tokens * 8], return_tensors="pt").input_ids[:, :tokens]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    texts = []
    for start in range(0, tokens, CONTEXT):
        with torch.inference_mode():
            cache = model(ids[:, start : start + CONTEXT], use_cache=True).past_key_values
        layers = []
        for layer in cache.layers:
            pair = torch.stack([layer.keys[0], layer.values[0]])  # [2, heads, tokens, channels]
            blocks = pair.permute(2, 0, 1, 3).unflatten(0, (-1, BLOCK)).transpose(1, 2)
            layers.append(blocks.contiguous().view(torch.int16).numpy().view(np.uint16))
        texts.append(np.stack(layers))
    return np.concatenate(texts, axis=1)


def of_format(name: str, kv: np.ndarray) -> None:
    layers, blocks = kv.shape[:2]
    size = int(np.prod(kv.shape[2:]))
    tile = Tile(min(size & -size, 4096))
    values = kv.reshape(-1, tile.values)
    packed = np.empty((len(values), tile.size), np.uint8)
    overflows = pack(values, packed)
    back = np.empty_like(values)
    good = np.setdiff1d(np.arange(len(values)), overflows)
    rows = np.empty_like(values[good])
    unpack(packed[good], rows)
    back[good] = rows
    assert (back[good] == values[good]).all()
    counts = packed[good, tile.count].astype(int)
    by_layer = packed[:, tile.count].reshape(layers, -1).mean(axis=1) / tile.values
    bad = {divmod(int(at), blocks * size // tile.values)[1] // (size // tile.values) for at in overflows}
    tell(what=name, tile=tile.values, ratio=tile.size / tile.raw_size, escapes=counts.mean() / tile.values,
         escapes_worst_layer=float(by_layer.max()), most_of_a_tile=int(counts.max()), room=tile.room, blocks=blocks,
         layers=layers, unpackable_blocks=len(bad))  # fmt: skip


def further(kv: np.ndarray) -> None:
    exponents = (kv.reshape(len(kv), -1, GROUP) >> 7 & 0xFF).astype(int)
    distances = exponents.max(axis=2, keepdims=True) - exponents
    base = 8 / GROUP
    shares = np.bincount(distances.ravel(), minlength=256) / distances.size
    of_distances = -float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())
    entropies = []
    for layer in exponents:
        found = np.bincount(layer.ravel(), minlength=256) / layer.size
        entropies.append(-float((found[found > 0] * np.log2(found[found > 0])).sum()))
    beyond = {codes: float((distances >= codes).mean()) for codes in (7, 14, 22)}
    tell(what="further", entropy=8 + float(np.mean(entropies)), entropy_of_distances=8 + base + of_distances,
         bits_now=8 * Tile(4096).size / 4096,
         three_bits_and_four_more=8 + base + 3 + 4 * beyond[7] + 8 * beyond[22], beyond_7=beyond[7],
         beyond_14=beyond[14])  # fmt: skip


def of_numpy(kv: np.ndarray) -> None:
    values = np.resize(kv.reshape(-1), (2048, 4096))
    packed, back = np.empty((2048, Tile(4096).size), np.uint8), np.empty_like(values)
    rates = {}
    for name, work in (("pack", lambda: pack(values, packed)), ("unpack", lambda: unpack(packed, back))):
        took = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
        rates[name] = values.nbytes / min(took) / 1e9
    began = time.perf_counter()
    back[:] = values
    tell(what="numpy", **rates, copy=values.nbytes / (time.perf_counter() - began) / 1e9)


def made_up(channels: int, chance: np.random.Generator, tokens: int) -> np.ndarray:
    """uint16[tokens, heads, channels]: K with outlier channels."""
    larger = np.zeros((8, 128))
    for head in larger:
        head[chance.choice(128, channels, replace=False)] = 2 ** chance.uniform(2, 8, channels)
    turned = larger * np.cos(chance.uniform(0, 2 * np.pi, (tokens, 8, 128)))
    values = (chance.standard_normal(turned.shape) + turned).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def of_outliers(models: int = 8, tokens: int = 2400) -> None:
    chance = np.random.default_rng(0)
    tile = Tile(4096)
    for channels in (2, 4, 6, 8, 12, 16):
        shares = []
        for _ in range(models):
            words = made_up(channels, chance, tokens).reshape(-1, tile.values)
            shares.append(len(pack(words, np.empty((len(words), tile.size), np.uint8))) / len(words))
        tell(what="outliers", channels=channels, of=128, unpackable_tiles=statistics.median(shares), most=max(shares))


def of_groups(name: str, kv: np.ndarray) -> None:
    """``kv``: as of real_kv."""
    blocks, size = kv.shape[1], int(np.prod(kv.shape[2:]))
    tile = Tile(min(size & -size, 4096))
    room = tile.size - tile.bases - 1  # for the bases and the escapes
    for by, axes in (("token", (0, 1, 2, 3, 4, 5)), ("channel", (0, 1, 2, 4, 5, 3))):
        layers = [np.ascontiguousarray(layer[None].transpose(axes)).reshape(-1, tile.values) for layer in kv]
        for group in (32, 64, 128, 256):
            for bases in (1, 2):
                beside = bases * tile.values // group
                counts = np.stack([escapes(layer, group, bases).reshape(blocks, -1) for layer in layers])
                worst = counts.max(axis=(0, 2))  # of a block, which fits if all its tiles do
                tell(what="groups", kv=name, by=by, group=group, bases=bases, escapes=counts.mean() / tile.values,
                     ratio=float((tile.bases + 1 + beside + worst.max()) / tile.raw_size), blocks=blocks,
                     unpackable_blocks=int((worst > room - beside).sum()))  # fmt: skip


def escapes(values: np.ndarray, group: int, bases: int) -> np.ndarray:
    """Of each tile."""
    exponents = (values >> 7).astype(np.uint8).reshape(len(values), -1, group)
    distances = exponents.max(axis=2, keepdims=True) - exponents
    if bases == 1:
        beyond = distances >= ESCAPE
    else:
        is_near = distances < NEAR
        means = exponents.sum(axis=2, dtype=int) // np.maximum(np.count_nonzero(exponents, axis=2), 1)
        second = np.minimum(np.where(is_near, 0, exponents).max(axis=2), means + ABOVE_MEAN)[:, :, None]
        beyond = ~is_near & ((exponents > second) | (second - exponents.astype(int) >= ESCAPE - NEAR))
    return (beyond & (exponents > 0)).sum(axis=(1, 2))


def of_disk(folder: Path, rounds: int) -> None:
    """Every round has both kinds, in an order by lot: whatever slows the disk down meets both."""
    raw = 36 * 2 * BLOCK * 8 * 128 * 2
    sizes = {"raw": raw, "packed": -(-raw // Tile(4096).raw_size * Tile(4096).size // 4096) * 4096}
    memory = mmap.mmap(-1, BLOCKS_ON_DISK * raw)
    view = np.frombuffer(memory, np.uint8)
    view[:] = np.random.default_rng(0).integers(0, 256, len(view), np.uint8)
    start, slots, tags = view.ctypes.data, list(range(BLOCKS_ON_DISK)), [b""] * BLOCKS_ON_DISK
    took: dict[tuple[str, str], list[float]] = {}
    chance = random.Random(0)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        files = {kind: DiskFile(Path(inside) / kind, BLOCKS_ON_DISK, size) for kind, size in sizes.items()}
        for name in ("write", "read"):  # one after the other: a read beside what the disk still writes says little
            for number in range(rounds + 1):
                for kind in chance.sample(list(files), len(files)):
                    file = files[kind]
                    addresses = [start + slot * file.slot_bytes for slot in slots]
                    began = time.perf_counter()
                    operation = getattr(file, name)(slots, addresses, tags)
                    operation.wait()
                    if number:  # the first write to a preallocated place costs the filesystem more
                        took.setdefault((kind, name), []).append(1e3 * (time.perf_counter() - began))
                    assert not operation.bad, operation.reason
            for file in files.values():
                file.sync()
        for file in files.values():
            file.close()
    for name in ("write", "read"):
        ratio, low, high = paired_ratio(took["packed", name], took["raw", name])
        tell(what=f"disk {name}", bytes=sizes["packed"] / sizes["raw"], time=ratio, low=low, high=high, rounds=rounds,
             **{f"{kind}_ms": statistics.median(took[kind, name]) for kind in sizes},
             **{f"{kind}_gb_s": BLOCKS_ON_DISK * size / min(took[kind, name]) / 1e6 for kind, size in sizes.items()},
             )  # fmt: skip


def paired_ratio(ours: list[float], others: list[float], draws: int = 1000) -> tuple[float, float, float]:
    """The median over all rounds of the ratio in a round, with the ends of the interval that holds 95 % of what other
    rounds like these give (bootstrap)."""
    ratios = [one / other for one, other in zip(ours, others, strict=True)]
    source = random.Random(0)
    drawn = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), drawn[draws // 40], drawn[-(draws // 40) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--tokens", type=int, default=1024, help=f"a multiple of {BLOCK}")
    parser.add_argument("--kv", type=Path, help="a file of numpy with this KV; written if it is not there")
    parser.add_argument("--disk", type=Path, help="measure the disk tier in this directory as well")
    parser.add_argument("--rounds", type=int, default=30, help="of the disk tier (30)")
    parser.add_argument("--only-disk", action="store_true", help="measure nothing else")
    args = parser.parse_args()
    if not args.only_disk:
        of_values(args)
    if args.disk:
        of_disk(args.disk, args.rounds)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


def of_values(args: argparse.Namespace) -> None:
    kv = np.load(args.kv) if args.kv and args.kv.exists() else real_kv(args.tokens)
    if args.kv:
        np.save(args.kv, kv)
    of_format("K and V", kv)
    of_format("K", kv[:, :, :1])
    of_format("V", kv[:, :, 1:])
    of_groups("K and V", kv)
    for times in (64, 1024):
        name = f"K and V, one channel of K {times} times as large"
        outliers = kv.copy()
        outliers[:, :, 0, :, :, 5] += np.uint16(times.bit_length() - 1 << 7)
        of_format(name, outliers)
        of_groups(name, outliers)
    of_outliers()
    for channels in (6, 8, 12):
        words = made_up(channels, np.random.default_rng(0), 16000)
        of_groups(f"K with {channels} outlier channels of 128", words.reshape(1, -1, 1, BLOCK, 8, 128))
    further(kv)
    of_numpy(kv)


if __name__ == "__main__":
    main()
