"""Staging in vLLM's V1 model runner, which the CPU build uses."""
