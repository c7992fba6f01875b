"""Where upstream has the class itself."""

from kvbm.engines.vllm.pd import PdConnector, PdConnectorMetadata

__all__ = ["PdConnector", "PdConnectorMetadata"]
