"""What the plugin would stage of a model, from its config.json alone: facts, engine, prediction."""
