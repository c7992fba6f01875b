"""The TensorRT-LLM adapter.

TensorRT-LLM makes one connector scheduler on rank 0 and one connector worker on every rank. Ours are
:mod:`~kvbm.engines.trtllm.leader` and :mod:`~kvbm.engines.trtllm.worker`; :mod:`~kvbm.engines.trtllm.connector` holds
the classes the engine is pointed at, and :mod:`~kvbm.engines.trtllm.compat` all that differs between releases.

Two ways lead from the leader to the workers. What belongs to a step (stores, fences) travels in the engine's own step
metadata, which every rank gets before it computes. Loads do not belong to a step: a request that loads is not in the
batch, and a step without a batch has no metadata. They go over the ZeroMQ channel, as reports do on their way back.

The engine takes a finished load's word for it: it has no way to hear that blocks did not arrive. So a rank that has
lost blocks says nothing at all, which holds the request where it is, and the leader has every rank set the request
back to the first block that is missing before it may go on (:class:`~kvbm.plans.Recompute`).
"""
