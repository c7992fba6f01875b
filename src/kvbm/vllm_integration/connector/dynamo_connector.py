"""Where upstream has the class itself."""

from kvbm.engines.vllm.connector import DynamoConnector, DynamoConnectorMetadata

__all__ = ["DynamoConnector", "DynamoConnectorMetadata"]
