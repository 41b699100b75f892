"""Staging in vLLM's V2 model runner, the default on a GPU."""
