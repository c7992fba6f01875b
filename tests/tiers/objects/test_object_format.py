"""Objects are verified on every read, and reveal nothing where a secret is set."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from object_blocks import keys_of

from kvbm.core.keys import in_group
from kvbm.tiers.objects.format import (
    Codec,
    DamagedError,
    Names,
    RefusedError,
    blocks_in,
    blocks_of_name,
    group_bits,
    object_id,
    object_of,
    open_text,
    place_of,
    seal_text,
    split_place,
)

SCOPE = b"\1" * 32
SECRETS = pytest.mark.parametrize("secret", ["", "a secret"], ids=["plain", "encrypted"])
TAGS = keys_of([1, 2, 3])
PAYLOADS = [bytes([65 + i]) * 500 for i in range(3)]


def encoded(codec, tags=TAGS, payloads=PAYLOADS):
    return b"".join(bytes(piece) for piece in codec.encode(tags, payloads))


def read_all(codec, data, tags=TAGS):
    contents = codec.open(data)
    found = []
    for index, tag in enumerate(tags):
        target = bytearray(contents.block_bytes)
        codec.read_block(contents, index, tag, memoryview(target))
        found.append(bytes(target))
    return found


@SECRETS
def test_an_object_gives_back_its_blocks(secret):
    codec = Codec(SCOPE, secret)
    data = encoded(codec)
    assert len(data) == codec.size(3, 32, 500)
    assert read_all(codec, data) == PAYLOADS


@SECRETS
def test_a_flipped_bit_anywhere_is_refused(secret):
    codec = Codec(SCOPE, secret)
    data = encoded(codec)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(RefusedError):
            read_all(codec, damaged)


@SECRETS
def test_a_truncated_object_is_refused_with_a_reason(secret):
    codec = Codec(SCOPE, secret)
    data = encoded(codec)
    for size in range(len(data)):
        with pytest.raises(DamagedError, match="truncated"):
            codec.open(data[:size])
    with pytest.raises(DamagedError, match="truncated or damaged"):
        codec.open(data + b"\0")


@SECRETS
def test_an_object_of_another_block_is_refused(secret):
    codec = Codec(SCOPE, secret)
    contents = codec.open(encoded(codec))
    target = memoryview(bytearray(500))
    for tag in (TAGS[1], keys_of([9])[0], TAGS[0] + b"generation"):
        with pytest.raises(RefusedError, match="holds another block"):
            codec.read_block(contents, 0, tag, target)
    with pytest.raises(RefusedError, match="blocks of 500 bytes, expected 499"):
        codec.read_block(contents, 0, TAGS[0], target[:-1])


def test_payloads_cannot_change_places_within_an_encrypted_object():
    codec = Codec(SCOPE, "a secret")
    data = encoded(codec)
    stride = 500 + 16
    head = data[: -3 * stride]
    first, second, third = (data[len(head) + i * stride :][:stride] for i in range(3))
    with pytest.raises(DamagedError, match="does not decrypt"):
        read_all(codec, head + second + first + third)


def test_another_secret_or_none_cannot_open_an_object():
    sealed, plain = encoded(Codec(SCOPE, "a secret")), encoded(Codec(SCOPE))
    with pytest.raises(RefusedError, match="another secret"):
        Codec(SCOPE, "b secret").open(sealed)
    with pytest.raises(RefusedError, match="another secret"):
        Codec(b"\2" * 32, "a secret").open(sealed)
    with pytest.raises(RefusedError, match="no secret is set"):
        Codec(SCOPE).open(sealed)
    with pytest.raises(RefusedError, match="not encrypted"):
        Codec(SCOPE, "a secret").open(plain)


def test_without_the_secret_an_object_and_its_name_reveal_neither_keys_nor_kv():
    names = Names({"model": "m"}, "a secret")
    data = encoded(Codec(names.scope, "a secret"))
    assert not any(tag in data for tag in TAGS)
    assert not any(payload[:16] in data for payload in PAYLOADS)
    plain = Names({"model": "m"})
    for tag in TAGS:
        name, guess = names.of(0, object_id(tag, 0)), plain.of(0, object_id(tag, 0))
        assert tag.hex()[:8] not in name
        assert not {*guess.split("/")[1:]} & {*name.split("/")[1:]} - {"0"}, "a guess of the tokens can be confirmed"
    # The same KV twice gives two different objects: equal content cannot be seen.
    assert data[100:] != encoded(Codec(names.scope, "a secret"))[100:]


def test_two_salts_never_share_an_object():
    tokens = list(range(64))
    names = Names({"model": "m"}, "a secret")
    of_salt = [
        {names.of(0, object_id(key, bits)) for key in keys_of(tokens, salt) for bits in (0, 3)}
        for salt in (None, "", "tenant-a", "tenant-b")
    ]
    assert len(set.union(*of_salt)) == sum(map(len, of_salt)) == 4 * 128


def test_groups_of_layers_have_objects_of_their_own():
    keys = keys_of(list(range(16)))
    names = Names({"model": "m"})
    found = {names.of(0, object_id(key, 0)) for group in range(4) for key in in_group(keys, group)}
    assert len(found) == 64


def test_caches_ranks_and_groups_have_names_of_their_own():
    key = keys_of([1])[0]
    found = {
        Names({"model": model}, secret).of(rank, object_id(key, bits))
        for model in "ab" for secret in ("", "x", "y") for rank in (0, 1) for bits in (0, 3)
    }  # fmt: skip
    assert len(found) == 24
    assert Names({"model": "a", "format": 3}).root == Names({"model": "a"}).root


@given(st.binary(min_size=32, max_size=32), st.integers(0, 6), st.integers(0, 63))
def test_a_place_says_which_object_and_where(key, bits, index):
    identifier = object_id(key, bits)
    place = place_of(identifier, index)
    assert 0 <= place < 2**63, "a plan carries 64-bit integers"
    assert split_place(place) == (identifier, index)
    assert object_of(place) == identifier
    assert blocks_in(identifier) == 1 << bits
    assert blocks_of_name(Names({}).of(0, identifier)) == 1 << bits


def test_small_blocks_are_grouped_to_two_megabytes_and_large_ones_stand_alone():
    assert group_bits(2 << 20) == 0
    assert (64 << 10) << group_bits(64 << 10) == 2 << 20
    assert 1 << group_bits(512 << 10) == 4
    assert group_bits(1) == 6


def test_other_objects_of_a_bucket_count_no_blocks():
    for name in ("kvbm-1/x/lease", "kvbm-1/x/0/abc", "kvbm-1/x/0/abc-0", "kvbm-1/x/0/abc-65", "a-b", ""):
        assert blocks_of_name(name) == 0


def test_a_description_needs_its_secret():
    text = os.urandom(40)
    assert open_text(seal_text(text, ""), "") == text
    assert open_text(seal_text(text, "s"), "s") == text
    assert text not in seal_text(text, "s")
    for data in (seal_text(text, "t"), text, b""):
        with pytest.raises(RefusedError):
            open_text(data, "s")
