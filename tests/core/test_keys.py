"""Equal keys mean equal KV: what must change a key, what must not, and what other software computes the same way."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbm.core.keys import KEY_BYTES, KeyChain, Namespace, Scope

NAMESPACE = Namespace(model="llama", dtype="bfloat16", layout="v1:32x2x8x128", block_size=4)
TOKENS = list(range(100, 132))  # 8 blocks


def keys_of(tokens=TOKENS, namespace=NAMESPACE, **scope):
    return KeyChain(namespace, Scope(**scope)).extend(tokens)


def shared_prefix(a, b):
    """How many leading keys two lists have in common; the rest must have nothing in common at all."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert not set(a[n:]) & set(b[n:])
    return n


# -- the chain --------------------------------------------------------------------------------------------------------


def test_every_full_block_has_a_key_and_a_partial_one_has_none():
    assert keys_of([]) == []
    assert keys_of(TOKENS[:3]) == []
    assert len(keys_of(TOKENS[:4])) == 1
    assert len(keys_of(TOKENS[:7])) == 1
    assert len(keys_of(TOKENS[:8])) == 2
    assert {len(key) for key in keys_of()} == {KEY_BYTES}


def test_keys_depend_on_nothing_but_their_inputs():
    # Keys name blocks on disk: they must be the same in another process, on another day.
    scoped = keys_of(lora="a", cache_salt="s", multimodal=((5, "cat"),))
    assert keys_of()[0].hex() == "b92e8acfa52abc3141ad3c66e39b02bd17aad2c75fc8f16041076692a287a476"
    assert keys_of()[-1].hex() == "6ed828f86bc35ecb98a8f1c0c77cbe986a0bdcf509962a839961932fb45e8e6a"
    assert scoped[-1].hex() == "f00ee0c6fe6588b233586c3f5c1cfb9b663b18a2b2db3e45c6d03d7176bd60e9"


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.lists(st.integers(0, 60), max_size=8))
@settings(deadline=None)
def test_growing_step_by_step_gives_the_keys_of_the_whole(tokens, lengths):
    chain = KeyChain(NAMESPACE)
    for length in sorted(lengths):
        assert chain.extend(tokens[:length]) == keys_of(tokens[:length])
    assert chain.extend(tokens) == keys_of(tokens)


@given(
    st.lists(st.integers(0, 40), unique=True, max_size=4).map(sorted),
    st.lists(st.integers(0, 40), min_size=1, max_size=6).map(sorted),
)
@settings(deadline=None)
def test_growing_step_by_step_meets_the_same_images(positions, lengths):
    images = tuple((position, f"image{position}") for position in positions)
    tokens = list(range(40))
    chain = KeyChain(NAMESPACE, Scope(multimodal=images))
    for length in lengths:
        assert chain.extend(tokens[:length]) == keys_of(tokens[:length], multimodal=images)
    assert chain.extend(tokens) == keys_of(tokens, multimodal=images)


def test_a_key_stands_for_all_tokens_before_it():
    for changed in range(len(TOKENS)):
        other = list(TOKENS)
        other[changed] += 1
        assert shared_prefix(keys_of(), keys_of(other)) == changed // 4


def test_equal_blocks_at_different_places_have_different_keys():
    assert len(set(keys_of([7, 7, 7, 7] * 8))) == 8


def test_a_longer_prompt_begins_with_the_keys_of_the_shorter():
    assert keys_of([*TOKENS, 1, 2, 3, 4])[:8] == keys_of()


def test_tokens_may_be_any_sequence_of_integers():
    assert keys_of(tuple(TOKENS)) == keys_of(array("i", TOKENS)) == keys_of(range(100, 132)) == keys_of()


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_does_not_fit_is_refused_and_leaves_the_chain_as_it_was(token):
    chain = KeyChain(NAMESPACE)
    chain.extend(TOKENS[:8])
    with pytest.raises(OverflowError):
        chain.extend([*TOKENS[:15], token])
    assert chain.extend(TOKENS) == keys_of()


def test_the_largest_token_is_accepted():
    assert len(keys_of([2**32 - 1] * 4)) == 1


# -- what all blocks of an engine have in common ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama2"},
        {"dtype": "float16"},
        {"layout": "v1:32x2x8x64"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"scheme": "kvbm-sha256-2"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_engines_whose_namespaces_differ_share_no_block(change):
    other = Namespace(**{**{f: getattr(NAMESPACE, f) for f in NAMESPACE.__struct_fields__}, **change})
    assert other.digest() != NAMESPACE.digest()
    assert shared_prefix(keys_of(), keys_of(namespace=other)) == 0


def test_engines_whose_block_sizes_differ_share_no_block():
    other = Namespace(model="llama", dtype="bfloat16", layout="v1:32x2x8x128", block_size=8)
    assert not set(keys_of()) & set(keys_of(namespace=other))


def test_no_field_of_the_namespace_runs_into_the_next():
    a = Namespace(model="ab", dtype="c", layout="", block_size=4, tensor_parallel=1, pipeline_parallel=2)
    for other in (
        Namespace(model="a", dtype="bc", layout="", block_size=4, tensor_parallel=1, pipeline_parallel=2),
        Namespace(model="ab", dtype="", layout="c", block_size=4, tensor_parallel=1, pipeline_parallel=2),
        Namespace(model="ab", dtype="c", layout="", block_size=4, tensor_parallel=2, pipeline_parallel=1),
    ):
        assert a.digest() != other.digest()


# -- what sets a request apart ----------------------------------------------------------------------------------------


def test_adapters_and_salts_share_no_block():
    scopes = [
        {},
        {"lora": ""},
        {"lora": "a"},
        {"lora": "b"},
        {"cache_salt": ""},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora": "a", "cache_salt": "a"},
        {"lora": "a", "cache_salt": "b"},
        {"lora": "ab"},
        {"lora": "a", "cache_salt": ""},
        {"lora": "", "cache_salt": "a"},
    ]
    first = [keys_of(**scope)[0] for scope in scopes]
    assert len(set(first)) == len(scopes)
    last = [keys_of(**scope)[-1] for scope in scopes]
    assert len(set(last)) == len(scopes)


_text = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@given(_text, _text, _text, _text)
@settings(deadline=None)
def test_no_adapter_and_salt_pass_for_another_pair(lora, salt, other_lora, other_salt):
    same = (lora, salt) == (other_lora, other_salt)
    equal = keys_of(lora=lora, cache_salt=salt) == keys_of(lora=other_lora, cache_salt=other_salt)
    assert equal == same


def test_a_salt_cannot_pass_for_tokens():
    # The bytes of one token moved from the prompt into the salt.
    token = 0x61626364
    with_token = keys_of([token, *TOKENS], cache_salt="x")
    with_salt = keys_of(TOKENS, cache_salt="x" + token.to_bytes(4, "little").decode())
    assert not set(with_token) & set(with_salt)


# -- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 1, 3, 4, 5, 7, 8, 28, 31])
def test_blocks_before_an_image_are_shared_and_no_block_after(position):
    cat, dog = keys_of(multimodal=((position, "cat"),)), keys_of(multimodal=((position, "dog"),))
    assert shared_prefix(cat, dog) == position // 4
    assert shared_prefix(cat, keys_of()) == position // 4


def test_an_image_beyond_the_full_blocks_changes_nothing_yet():
    assert keys_of(multimodal=((32, "cat"),)) == keys_of()
    assert keys_of(TOKENS[:31], multimodal=((28, "cat"),)) == keys_of()[:7]


def test_an_image_counts_from_its_own_position():
    assert shared_prefix(keys_of(multimodal=((5, "cat"),)), keys_of(multimodal=((6, "cat"),))) == 1


def test_the_order_of_images_counts():
    one = keys_of(multimodal=((4, "cat"), (12, "dog")))
    two = keys_of(multimodal=((4, "dog"), (12, "cat")))
    assert shared_prefix(one, two) == 1


def test_two_images_in_one_block_both_count():
    both = keys_of(multimodal=((4, "cat"), (6, "dog")))
    assert shared_prefix(both, keys_of(multimodal=((4, "cat"),))) == 1
    assert shared_prefix(both, keys_of(multimodal=((6, "dog"),))) == 1
    assert shared_prefix(both, keys_of(multimodal=((4, "dog"), (6, "cat")))) == 1
    assert shared_prefix(both, keys_of(multimodal=((4, "catdog"),))) == 1
    assert shared_prefix(both, keys_of(multimodal=((4, "cat"), (7, "dog")))) == 1


def test_an_image_that_comes_later_leaves_the_first_image_shared():
    one = keys_of(multimodal=((4, "cat"), (12, "dog")))
    two = keys_of(multimodal=((4, "cat"), (16, "owl")))
    assert shared_prefix(one, two) == 3


def test_image_names_cannot_pass_for_tokens():
    # Whatever follows the image's name in the hasher must not be mistaken for it.
    name = "cat"
    longer = name + (0x61616161).to_bytes(4, "little").decode()
    assert not set(keys_of([0x61616161] * 8, multimodal=((0, name),))) & set(
        keys_of([0x61616161] * 4, multimodal=((0, longer),))
    )


def test_images_and_salts_do_not_mix():
    assert not set(keys_of(cache_salt="cat")) & set(keys_of(multimodal=((0, "cat"),)))
    assert not set(keys_of(lora="a", multimodal=((0, "cat"),))) & set(keys_of(multimodal=((0, "cat"),)))
