"""Model knowledge: pairs, config.json, shapes, the byte model."""
