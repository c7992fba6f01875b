"""Prefill here, decode there: KV goes by NIXL, and a prefill worker reuses what KVBM has kept."""

from __future__ import annotations

import re

import pytest
from stack import ANSWER, Stack, prompt, wait_until

BLOCK = 32
DECODE, PREFILL = 0, 1  # in the order of the script


@pytest.mark.parametrize("decode_kvbm", ["0", "1"])
def test_a_prefill_worker_brings_back_what_it_has_computed_before(
    decode_kvbm, aggregated, model, tmp_path, patient_servers
):
    expected = aggregated[prompt(1)]
    env = {**patient_servers, "KVBM_DECODE": decode_kvbm}
    stack = Stack("disagg_kvbm.sh", 2, model, tmp_path, env)
    try:
        stack.ready(2)
        begun = len(stack.process.log.read_bytes())
        answer, usage = stack.chat(prompt(1), ANSWER)
        assert answer == expected
        blocks = (usage["prompt_tokens"] - 1) // BLOCK
        wait_until(
            "the prefill worker has kept it", lambda: stack.figures(PREFILL)["kvbm_offload_blocks_d2h"] >= blocks
        )
        assert stack.figures(PREFILL)["kvbm_onboard_blocks_h2d"] == 0
        for filler in range(8):  # push it out of both GPU caches
            stack.chat(prompt(100 + filler), 1)
        before = stack.figures(PREFILL)["kvbm_onboard_blocks_h2d"]
        answer, _ = stack.chat(prompt(1), ANSWER)
        assert answer == expected
        assert stack.figures(PREFILL)["kvbm_onboard_blocks_h2d"] - before == blocks
        if decode_kvbm == "1":
            assert stack.figures(DECODE)["kvbm_offload_blocks_d2h"] >= blocks
        log = stack.process.log.read_bytes()
        assert not re.findall(rb"NIXL transfer failure|handshake_failed|Failing \d+ request", log[begun:])
        assert b"Backend UCX was instantiated" in log
    finally:
        stack.close()


@pytest.mark.parametrize("script", ["disagg_kvbm_2p2d.sh", "disagg_kvbm_router.sh"])
def test_two_of_each_answer_as_one_does(script, aggregated, model, tmp_path, patient_servers):
    stack = Stack(script, 4, model, tmp_path, patient_servers)
    try:
        stack.ready(4)
        for seed in range(1, 5):
            assert stack.chat(prompt(seed), ANSWER)[0] == aggregated[prompt(seed)]
        kept = [stack.figures(worker)["kvbm_offload_blocks_d2h"] for worker in (2, 3)]
        assert sum(kept) >= 4 * 9
    finally:
        stack.close()
