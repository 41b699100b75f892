"""Predictions of the byte model, as text, rows and a page. Nothing here is measured."""
