"""The vLLM adapter.

vLLM makes two connectors an engine: one in the scheduler process (role SCHEDULER), one in every worker process. They
are the same class, :class:`~kvbm.engines.vllm.connector.DynamoConnector`, over two different adapters:
:mod:`~kvbm.engines.vllm.scheduler` drives the leader, :mod:`~kvbm.engines.vllm.worker` drives this rank's worker. Plans
travel in vLLM's connector metadata, reports in its worker metadata. What differs between vLLM releases is in
:mod:`~kvbm.engines.vllm.compat` and nowhere else.
"""
