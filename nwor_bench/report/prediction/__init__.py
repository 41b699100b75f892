"""Predictions of the byte model as text, tables and a page. Nothing is measured."""
