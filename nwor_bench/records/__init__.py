"""What a run writes down: its records, its header, and the folder that keeps them."""
