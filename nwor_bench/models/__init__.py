"""Model knowledge: pairs, training of drafters, config.json, shapes, the byte model."""
