"""The module path of older guides; :mod:`kvbm.trtllm_integration.connector` is what they mean today.

A lone module, and no ``__init__.py`` above it: where Dynamo itself is installed, ``dynamo`` and ``dynamo.llm`` stay
Dynamo's, and this is one more module in the latter.
"""

from kvbm.trtllm_integration.connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]
