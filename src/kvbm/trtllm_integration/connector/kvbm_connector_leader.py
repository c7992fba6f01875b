"""Where upstream has the class itself."""

from kvbm.engines.trtllm.connector import DynamoKVBMConnectorLeader

__all__ = ["DynamoKVBMConnectorLeader"]
