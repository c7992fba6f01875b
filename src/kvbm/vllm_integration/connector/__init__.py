"""``--kv-transfer-config`` points here: ``"kv_connector_module_path": "kvbm.vllm_integration.connector"``."""

from kvbm.engines.vllm.connector import DynamoConnector, DynamoConnectorMetadata
from kvbm.engines.vllm.pd import PdConnector, PdConnectorMetadata

__all__ = ["DynamoConnector", "DynamoConnectorMetadata", "PdConnector", "PdConnectorMetadata"]
