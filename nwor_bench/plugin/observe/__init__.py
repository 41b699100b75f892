"""What else the plugin sees of a window: bytes, launches, phases, ranges, cache rows."""
