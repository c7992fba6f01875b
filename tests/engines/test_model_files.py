"""Files of a model that change its KV and are in no tensor."""

from __future__ import annotations

import pytest

from kvbm.engines.model_files import digest_of_files, folder_of


def test_content_counts_and_times_do_not(tmp_path):
    import os

    file = tmp_path / "preprocessor_config.json"
    file.write_text('{"size": 224}')
    before = digest_of_files(tmp_path, processor=True, code=True)
    os.utime(file, (1, 1))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert digest_of_files(tmp_path, processor=True, code=True) == before
    file.write_text('{"size": 336}')
    assert digest_of_files(tmp_path, processor=True, code=True) != before


def test_a_byte_that_moves_from_one_file_to_the_next_counts(tmp_path):
    def write(first, second):
        (tmp_path / "a_processor.json").write_text(first)
        (tmp_path / "b_processor.json").write_text(second)
        return digest_of_files(tmp_path, processor=True, code=False)

    assert write("xy", "z") != write("x", "yz")


@pytest.mark.parametrize(("processor", "code"), [(False, False), (True, False), (False, True)])
def test_only_the_files_that_are_asked_for_count(tmp_path, processor, code):
    before = digest_of_files(tmp_path, processor=processor, code=code)
    assert before == ""
    (tmp_path / "processor_config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("")
    assert bool(digest_of_files(tmp_path, processor=processor, code=code)) == (processor or code)


def test_a_model_is_a_folder_a_file_or_in_the_hubs_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    file = tmp_path / "model.gguf"
    file.touch()
    assert folder_of(str(tmp_path)) == folder_of(str(file)) == tmp_path
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *about, revision: None)
    assert folder_of("some/model") is None
    asked = []
    monkeypatch.setattr(
        hub, "try_to_load_from_cache", lambda *about, revision: asked.append(revision) or str(tmp_path / "config.json")
    )
    assert folder_of("some/model", "abc") == tmp_path
    assert asked == ["abc"]
