"""Predicts from a config.json whether the plugin would stage a model: facts, engine, prediction."""
