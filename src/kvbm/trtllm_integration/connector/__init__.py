"""``kv_connector_config`` points here: ``connector_module: kvbm.trtllm_integration.connector``."""

from kvbm.engines.trtllm.connector import DynamoKVBMConnectorLeader, DynamoKVBMConnectorWorker

__all__ = ["DynamoKVBMConnectorLeader", "DynamoKVBMConnectorWorker"]
