"""Windows of gated delta nets (Qwen3-Next, Qwen3.5) that write one recurrent state, not k + 1."""
