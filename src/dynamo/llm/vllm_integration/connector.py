"""The module path of older guides; :mod:`kvbm.vllm_integration.connector` is what they mean today.

A lone module, and no ``__init__.py`` above it: where Dynamo itself is installed, ``dynamo`` and ``dynamo.llm`` stay
Dynamo's, and this is one more module in the latter.
"""

from kvbm.vllm_integration.connector import (
    DynamoConnector,
    DynamoConnectorMetadata,
    PdConnector,
    PdConnectorMetadata,
)

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector", "PdConnectorMetadata"]
