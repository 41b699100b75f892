"""nwor-bench: what happens to the KV cache in speculative decoding, measured.

Importing this package pulls in neither torch nor vLLM.
"""

__version__ = "0.1.0"
