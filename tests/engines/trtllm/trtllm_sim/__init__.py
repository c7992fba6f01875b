"""A simulator of TensorRT-LLM's executor, as far as a KV cache connector can see it. A test tool, and not the engine.

TensorRT-LLM needs a GPU and cannot be installed everywhere; this can. It runs one process a rank, each with its own
scheduler, block manager and pool, in lockstep by broadcast and allgather, and calls a connector the way the engine's
executor loop does: the same calls, in the same order, from one thread a rank. The model is a fake one over integers
whose every token depends on every byte of KV that it reads, so that a wrong byte shows in the output.

    api         the engine's modules that a connector imports, in two generations of the interface
    comm        broadcast and allgather between the ranks
    model       the fake model, over a pool tensor [blocks, layers, 2, ...] on the CPU or a GPU
    blocks      who owns which block; prefix reuse
    connector   what the engine keeps of loads and saves that are under way
    executor    the loop of one rank: schedule, forward, sample, respond
    workload    random conversations
    launch      starts the ranks, watches them, collects what they have to say

``python -m trtllm_sim --help`` runs it by hand.
"""
