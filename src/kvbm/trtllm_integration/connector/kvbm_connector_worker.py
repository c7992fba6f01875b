"""Where upstream has the class itself."""

from kvbm.engines.trtllm.connector import DynamoKVBMConnectorWorker

__all__ = ["DynamoKVBMConnectorWorker"]
