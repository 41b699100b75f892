"""What is known of models: pairs, training of drafters, config.json, shapes, and the byte model."""
