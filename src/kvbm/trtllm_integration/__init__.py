"""The module path that TensorRT-LLM configurations name; see :mod:`kvbm.engines.trtllm`."""
